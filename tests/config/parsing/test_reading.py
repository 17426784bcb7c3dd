import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery import config
from joulery.config.parsing.reading import check, load, parse, schema
from joulery.domain.errors import ConfigError
from joulery.domain.serving.service import Slice, SliceKind, Slo, SloScope
from tests.config.site_text import SITE, changed, written


def test_a_whole_site_is_read_in_si_units(tmp_path):
    site = load(written(tmp_path, SITE))
    service = site.service("photos")
    assert site.mode is config.Mode.ACT
    assert site.pue == 1.2
    assert site.meters.period_s == 0.05
    assert site.meters.cpu_model.band_ratio == 0.5
    assert site.fleet.cpu.as_slices() == (Slice(SliceKind.CPU, cores=1),) * 2
    assert service.slo.as_slo() == Slo(0.08, 0.95, SloScope.END_TO_END)
    assert service.policy.base_g_per_kwh == 250.0
    family = service.family.as_family(service.name)
    assert family.largest.name == "lite2"
    assert family["lite0"].accuracy_ratio == 0.751
    assert (site.serving.host, site.serving.port) == ("127.0.0.1", 8080)
    assert (site.load.kind, site.load.rate_rps, site.load.duration_s, site.load.seed) == ("poisson", 40.0, 90.0, 7)
    with pytest.raises(KeyError):
        site.service("absent")


def test_the_smallest_site_has_defaults_that_touch_nothing():
    site = parse("joulery: 1")
    assert site.mode is config.Mode.ADVISE
    assert site.services == ()
    assert site.serving.host == "127.0.0.1"
    assert site.pue == 1.0


def test_a_site_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse("joulery: 1").name = "other"


def test_cut_rate_and_load_may_be_left_to_what_is_measured():
    text = SITE.replace("slices: [1, 1]", "cores: 2").replace("    rate: 40 /s\n", "")
    site = parse(text.replace("poisson, rate: 40 /s", "poisson, utilisation: 45 %"))
    assert site.fleet.cpu.as_slices() is None and site.fleet.cpu.cores == 2
    assert site.service("photos").rate_rps is None and site.service("photos").profile is None
    assert (site.load.rate_rps, site.load.utilisation_ratio) == (None, 0.45)


TWO = """
joulery: 1
services:
  - {name: a, model: m, slo: {latency: 1 s}}
  - {name: b, model: m, slo: {latency: 1 s}, cpu: {cores: 1}, load: {kind: constant, rate: 5 /s, duration: 2 s}}
load: {kind: poisson, rate: 9 /s, duration: 3 s}
"""


def test_every_service_may_have_a_load_of_its_own():
    site = parse(TWO)
    a, b = site.services
    assert site.load_of(a) is site.load, "the first service, where the site's load names none"
    assert site.load_of(b) is b.load and b.load.rate_rps == 5.0 and b.cpu.cores == 1
    named = parse(TWO.replace("load: {kind: poisson", "load: {service: a, kind: poisson"))
    assert named.load_of(named.services[0]) is named.load
    assert parse(TWO.rpartition("load:")[0]).load_of(a) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load: {kind: poisson", "load: {service: b, kind: poisson", "load: service b has a load of its own"),
        (
            "load: {kind: constant",
            "load: {service: a, kind: constant",
            "the load of a service goes to",
        ),
    ],
)
def test_a_service_has_one_load(old, new, message):
    with pytest.raises(ConfigError, match=message):
        parse(TWO.replace(old, new))


def test_paths_start_at_the_site_file(tmp_path):
    (tmp_path / "photos").mkdir()
    site = load(written(tmp_path, changed("poisson,", "poisson, inputs: photos,")))
    assert site.load.inputs == tmp_path / "photos"


GOLDEN = [
    (
        "latency: 80 ms",
        "latancy: 80 ms",
        "site.yaml:15 services.0.slo.latancy: unknown key 'latancy'",
        "did you mean latency?",
    ),
    (
        "mode: act",
        "colour: red",
        "site.yaml:3 colour: unknown key 'colour'",
        "known keys: joulery, name, mode, pue, ",
    ),
    (
        "latency: 80 ms",
        "latency: 80",
        "site.yaml:15 services.0.slo.latency: a time needs a unit (got '80', expected a time such as 80 ms)",
        "write 80 s",
    ),
    (
        "latency: 80 ms",
        "latency: 80 W",
        "site.yaml:15 services.0.slo.latency: is a power, not a time (got '80 W', expected a time such as 80 ms)",
        "",
    ),
    (
        "rate: 40 /s\n",
        "rate: -4 /s\n",
        "site.yaml:16 services.0.rate: must be above 0 /s (got '-4 /s', expected a rate such as 40 /s)",
        "",
    ),
    (
        "75.1 %",
        "75.1",
        "site.yaml:13 services.0.family.variants.0.accuracy: must be at most 1 "
        "(got '75.1', expected a ratio such as 75.1 % or 0.751)",
        "did you mean 75.1 %?",
    ),
    (
        "75.1 %",
        ".nan",
        "site.yaml:13 services.0.family.variants.0.accuracy: must be a finite number "
        "(got '.nan', expected a ratio such as 75.1 % or 0.751)",
        "",
    ),
    ("size: 0", "size: 9", "site.yaml:13 services.0.family.variants.0.model.size: must be at most 2 (got '9')", ""),
    (
        "size: 0",
        "size: zero",
        "site.yaml:13 services.0.family.variants.0.model.size: must be a whole number (got 'zero')",
        "",
    ),
    (
        "size: 0",
        "size: 1.0",
        "site.yaml:13 services.0.family.variants.0.model.size: must be a whole number (got '1.0')",
        "",
    ),
    (
        "size: 0",
        "path: x",
        "site.yaml:13 services.0.family.variants.0.model.path: unknown key 'path'",
        "known keys: kind, size",
    ),
    (
        "kind: clover",
        "kind: clovr",
        "site.yaml:18 services.0.policy.kind: is not a known kind (got 'clovr', expected clover, fixed, split)",
        "did you mean clover?",
    ),
    ("kind: clover, ", "", "site.yaml:18 services.0.policy: missing key 'kind'", "kinds: clover, fixed"),
    (
        "kind: clover, lambda: 0.5, base_intensity: 250 g/kWh",
        "kind: fixed, variant: lite9",
        "site.yaml:18 services.0.policy.variant: is not a variant of this service (got 'lite9', expected lite0, lite2)",
        "",
    ),
    (
        ", base_intensity: 250 g/kWh",
        "",
        "site.yaml:18 services.0.policy.base_intensity: missing key 'base_intensity'",
        "base_intensity: The intensity at which",
    ),
    (
        "mode: act",
        "mode: acte",
        "site.yaml:3 mode: is not a known value (got 'acte', expected advise, shadow or act)",
        "did you mean act?",
    ),
    ("joulery: 1", "joulery: 2", "site.yaml:1 joulery: is not a known value (got '2', expected 1)", ""),
    ("joulery: 1\n", "", "site.yaml:1 joulery: missing key 'joulery'", "joulery: Version of this format: 1."),
    ("pue: 1.2", "pue: 0.5", "site.yaml:4 pue: must be at least 1 (got '0.5')", ""),
    ("pue: 1.2", "pue: true", "site.yaml:4 pue: must be a number (got 'true')", ""),
    ("pue: 1.2", "pue:", "site.yaml:4 pue: must be a number (got nothing)", ""),
    ("[1, 1]", "[]", "site.yaml:6 fleet.cpu.slices: needs at least 1 item (got a list of 0)", ""),
    ("[1, 1]", "2", "site.yaml:6 fleet.cpu.slices: must be a list (got '2')", ""),
    ("[1, 1]", "[1, 0]", "site.yaml:6 fleet.cpu.slices.1: must be at least 1 (got '0')", ""),
    (
        "[1, 1]",
        "[1, 2], cores: 2",
        "site.yaml:6 fleet.cpu.slices: slices take 3 cores of 2 (got a list of 2)",
        "",
    ),
    (
        "{slices: [1, 1]}",
        "[1]",
        "site.yaml:6 fleet.cpu: must be a mapping (got a list of 1)",
        "",
    ),
    (
        "name: lite2",
        "name: lite0",
        "site.yaml:14 services.0.family.variants.1.name: is listed twice; names must differ (got 'lite0')",
        "",
    ),
    (
        "name: photos",
        "name: a/b",
        "site.yaml:8 services.0.name: is not a valid name "
        "(got 'a/b', expected letters, digits, '.', '_' and '-', at most 63)",
        "",
    ),
    (
        "quantile: 95 %",
        "quantile: 100 %",
        "site.yaml:15 services.0.slo.quantile: a quantile lies between 0 and 1, both excluded "
        "(got '100 %', expected such as 95 %)",
        "",
    ),
    (
        "minimum_accuracy: 74 %",
        "minimum_accuracy: 80 %",
        "site.yaml:17 services.0.minimum_accuracy: no variant is as accurate as that "
        "(got '80 %', expected at most 0.776)",
        "",
    ),
    (
        "max: 120 W",
        "max: 30 W",
        "site.yaml:5 meters.cpu_model.max: must be above idle (got '30 W', expected more than 30 W)",
        "",
    ),
    (
        "127.0.0.1:8080",
        "0.0.0.0:8080",
        "site.yaml:19 serving.listen: listening beyond this machine needs a token (got '0.0.0.0:8080')",
        "add serving.token_file, or listen on 127.0.0.1",
    ),
    (
        "127.0.0.1:8080",
        "127.0.0.1:80800",
        "site.yaml:19 serving.listen: is not an address "
        "(got '127.0.0.1:80800', expected host:port such as 127.0.0.1:8080, port 0 to 65535)",
        "",
    ),
    ("queue: 256", "token: short", "site.yaml:19 serving.token: a token needs at least 8 characters", ""),
    ("queue: 256", "token: 12345678", "site.yaml:19 serving.token: must be text", ""),
    (
        "poisson,",
        "poisson, inputs: nowhere,",
        "site.yaml:20 load.inputs: no such folder (got 'nowhere')",
        "paths are relative to the site file",
    ),
    (
        "poisson,",
        f"poisson, inputs: {'x' * 300},",
        f"site.yaml:20 load.inputs: cannot be looked at: File name too long (got '{'x' * 57}...')",
        "",
    ),
    (
        "{kind: poisson, rate: 40 /s,",
        "{kind: trace, path: nowhere.csv,",
        "site.yaml:20 load.path: no such file (got 'nowhere.csv')",
        "paths are relative to the site file",
    ),
    (
        "poisson,",
        "poisson, service: other,",
        "site.yaml:20 load.service: is not a service of this site (got 'other', expected photos)",
        "",
    ),
    (
        "poisson, rate: 40 /s",
        "poisson",
        "site.yaml:20 load: a load needs either rate or utilisation (got a mapping, expected such as rate: 40 /s)",
        "",
    ),
    (
        "poisson, rate: 40 /s",
        "poisson, utilisation: 95 %",
        "site.yaml:20 load.utilisation: must be above 0 and at most 90 % (got '95 %')",
        "",
    ),
    ("seed: 7", "seed: -1", "site.yaml:20 load.seed: must be at least 0 (got '-1')", ""),
    ("name: photos", "name: photos\n    name: again", "site.yaml:9: duplicate key 'name', first on line 8", ""),
    (
        "fleet: {",
        "fleet: {]",
        "site.yaml:6: not valid YAML: expected the node content, but found ']'",
        "",
    ),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), GOLDEN, ids=lambda value: str(value)[:40])
def test_each_fault_is_reported_with_its_line_and_a_hint(old, new, message, hint):
    with pytest.raises(ConfigError) as caught:
        parse(changed(old, new), file="site.yaml")
    assert str(caught.value) == message
    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{file}: the file is empty (expected a mapping that starts with joulery: 1)"),
        (b"\x7fELF\0\0", "{file}: this is a binary file (expected YAML text)"),
        (b"joulery: 1\nname: caf\xe9\n", "{file}:2: not UTF-8 (got byte 0xe9)"),
        (b"- joulery\n", "{file}:1: a site file is a mapping (expected joulery: 1)"),
        (b"joulery", "{file}:1: a site file is a mapping (expected joulery: 1)"),
        (b"#" * (1 << 20) + b"#", "{file}: the file is longer than 1 MiB"),
    ],
)
def test_what_is_no_site_file_is_refused(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == message.format(file=path)


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    for path, message in [
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert caught.value.message == message
        assert caught.value.file == os.fspath(path)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    assert load(written(tmp_path, b"\xef\xbb\xbfjoulery: 1\n")).joulery == 1


def test_every_fault_is_listed_in_the_order_of_the_file(tmp_path):
    text = changed("mode: act", "mode: acte").replace("80 ms", "80 W").replace("seed: 7", "sede: 7")
    site, errors = check(written(tmp_path, text))
    assert site is None
    assert [error.pointer for error in errors] == ["mode", "services.0.slo.latency", "load.sede"]


def test_a_misspelt_required_key_is_one_fault_not_two():
    site, errors = check_text(changed("latency: 80 ms", "latancy: 80 ms"))
    assert site is None
    assert [error.pointer for error in errors] == ["services.0.slo.latancy"]


def check_text(text):
    from pathlib import Path

    from joulery.config.parsing.reading import SITE, _parse

    return _parse(text, "site.yaml", Path(), SITE)


def test_a_secret_never_shows():
    site = parse(changed("queue: 256", "token: very-secret-token"))
    assert "very-secret" not in json.dumps(site.model_dump(mode="json"))
    assert "very-secret" not in repr(site)
    with pytest.raises(ConfigError) as caught:
        parse(changed("queue: 256", "token: [very-secret-token]"))
    assert "very-secret" not in str(caught.value) + caught.value.hint


def test_a_token_opens_the_outside(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    text = changed("127.0.0.1:8080", "0.0.0.0:8080").replace("queue: 256", "token_file: token")
    assert load(written(tmp_path, text)).serving.host == "0.0.0.0"
    with pytest.raises(ConfigError, match="token or token_file, not both"):
        load(written(tmp_path, text.replace("token_file: token", "token_file: token, token: secret-words")))


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        (":0", "127.0.0.1", 0),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:8080", "::1", 8080),
        ("127.8.8.8:1", "127.8.8.8", 1),
    ],
)
def test_addresses(listen, host, port):
    site = parse(changed("127.0.0.1:8080", listen))
    assert (site.serving.host, site.serving.port) == (host, port)


@pytest.mark.parametrize("listen", ["8080", "::1:8080", "a b:1", "host:", "host:-1", "host:٣"])
def test_what_is_no_address(listen):
    with pytest.raises(ConfigError, match="is not an address"):
        parse(changed("127.0.0.1:8080", listen))


def test_the_schema_accepts_what_the_models_accept():
    document = schema()
    assert document["additionalProperties"] is False
    assert document["required"] == ["joulery"]
    assert document["$defs"]["MetersConfig"]["properties"]["period"]["default"] == "0.1 s"
    json.dumps(document)


def test_every_key_is_documented():
    for name, part in {"Site": schema(), **schema()["$defs"]}.items():
        for key, field in part.get("properties", {}).items():
            assert key == "kind" or field.get("description"), f"{name}.{key} has no description"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KEYS = sorted({key for part in (schema(), *schema()["$defs"].values()) for key in part.get("properties", {})})
near_sites = st.recursive(
    scalars | st.sampled_from(["80 ms", "40 /s", "75 %", "clover", "fixed", "onnx", "poisson", "lite0", 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=40,
)


def only_config_errors(text):
    try:
        parse(text)
    except ConfigError as error:
        assert str(error)


@given(st.text())
def test_any_text_is_a_site_or_a_config_error(text):
    only_config_errors(text)


@given(st.text(alphabet="&*!|>'\"%@`#-:,?[]{}\\ \n\tab1.<~uUx", max_size=60))
def test_any_punctuation_is_a_site_or_a_config_error(text):
    only_config_errors(text)


@given(trees | near_sites)
def test_any_structure_is_a_site_or_a_config_error(tree):
    only_config_errors(json.dumps(tree))


@given(st.dictionaries(st.sampled_from(KEYS), near_sites, max_size=8))
def test_any_arrangement_of_known_keys_is_a_site_or_a_config_error(tree):
    only_config_errors(json.dumps({"joulery": 1, **tree}))


@given(st.data())
def test_any_one_change_of_a_good_file_is_a_site_or_a_config_error(data):
    at = data.draw(st.integers(0, len(SITE)))
    until = data.draw(st.integers(at, min(len(SITE), at + 12)))
    only_config_errors(SITE[:at] + data.draw(st.text(max_size=6)) + SITE[until:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_site_or_a_config_error(tmp_path, content):
    site, errors = check(written(tmp_path, content))
    assert (site is None) == bool(errors)
