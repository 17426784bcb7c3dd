"""Whatever stands in a run directory, a report is rendered or one JouleryError says why not."""

import copy
import json

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joulery.app.runs.bookkeeping import book
from joulery.app.runs.recorded import load_run
from joulery.domain.errors import JouleryError
from joulery.store.ledger import Ledger
from joulery.ui.cli.report import _render
from joulery.ui.reports.table import BY, roll_up
from tests.app.runs.test_recorded import measured_run
from tests.ui.demo import demo_run

FORMS = ("json", "csv", "text", "html")
leaves = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8)
anything = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=4), leaves, max_size=3)


def paths(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*path, index))


def replaced(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


@pytest.fixture(scope="module", params=["up", "killed", "measure", "killed measure"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    if "measure" in request.param:
        killed = request.param.startswith("killed")
        return measured_run(folder, report=not killed, state="running" if killed else "closed")
    return demo_run(folder, state="killed" if request.param == "killed" else "closed", n=6)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_run_is_rendered_or_refused(run, tmp_path, data):
    files = [run / name for name in ("manifest.json", "report.json", "log.jsonl") if (run / name).exists()]
    file = data.draw(st.sampled_from(files))
    original = file.read_bytes()
    lines = original.splitlines() if file.suffix == ".jsonl" else [original]
    at = data.draw(st.integers(0, len(lines) - 1))
    value = orjson.loads(lines[at])
    path = data.draw(st.sampled_from(sorted(paths(value), key=repr)))
    lines[at] = json.dumps(replaced(value, path, data.draw(anything))).encode()
    try:
        file.write_bytes(b"\n".join(lines) + b"\n")
        only_joulery_errors(run, tmp_path, data.draw(st.sampled_from(BY)), data.draw(st.sampled_from(FORMS)))
    finally:
        file.write_bytes(original)


def only_joulery_errors(run, tmp_path, by, form):
    try:
        rollup = roll_up([load_run(run, with_timeline=form == "html" or by == "hour")], by)
        assert _render(rollup, form, with_rows=True)
    except JouleryError as error:
        assert str(error)
    try:
        with Ledger(tmp_path / "ledger.db") as ledger:
            book(load_run(run), ledger)
    except JouleryError as error:
        assert str(error)
