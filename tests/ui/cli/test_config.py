import json

import pytest

from joulery.ui.cli import main
from tests.config.site_text import SITE, changed, written


def test_check_says_that_a_site_is_valid(tmp_path, capsys):
    path = written(tmp_path, SITE)
    assert main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid; photos; mode act\n"


def test_check_lists_every_fault_and_exits_2(tmp_path, capsys):
    path = written(tmp_path, changed("mode: act", "mode: acte").replace("80 ms", "80"))
    assert main(["config", "check", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{path}:3 mode: is not a known value (got 'acte', expected advise, shadow or act)",
        "  did you mean act?",
        f"{path}:15 services.0.slo.latency: a time needs a unit (got '80', expected a time such as 80 ms)",
        "  write 80 s",
    ]


def test_check_json(tmp_path, capsys):
    path = written(tmp_path, changed("80 ms", "80"))
    assert main(["config", "check", "--json", str(path)]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert answer["errors"][0]["line"] == 15
    assert main(["config", "check", "--json", str(written(tmp_path, SITE))]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(path), "valid": True, "errors": []}


@pytest.mark.parametrize("as_json", [True, False])
def test_show_fills_in_defaults_in_si_units(tmp_path, capsys, as_json):
    import yaml

    path = written(tmp_path, SITE)
    assert main(["config", "show", str(path), *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out) if as_json else yaml.safe_load(out)
    assert shown["services"][0]["slo"] == {"latency_s": 0.08, "quantile_ratio": 0.95, "scope": "end_to_end"}
    assert shown["serving"]["drain_s"] == 10.0


def test_show_masks_the_token(tmp_path, capsys):
    assert main(["config", "show", str(written(tmp_path, changed("queue: 256", "token: very-secret")))]) == 0
    assert "very-secret" not in capsys.readouterr().out


def test_show_of_a_wrong_file_is_one_error(tmp_path, capsys):
    assert main(["config", "show", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"joulery: {tmp_path}: cannot be read: Is a directory\n  name the file in the folder\n"
    )


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Site"
    assert main(["config", "schema", "--json"]) == 0
    assert "\n" not in capsys.readouterr().out.strip()
