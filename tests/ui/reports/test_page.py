"""The HTML report in a real browser."""

import pytest

from joulery.app.runs.recorded import load_run
from joulery.ui.reports.html import render_html
from joulery.ui.reports.table import roll_up
from tests.ui.demo import demo_run, ticks

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("browser")]
CHARTS = ["intensity", "power", "mix-0", "latency-0", "carbon"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = demo_run(tmp_path_factory.mktemp("report") / "run")
    path = folder.parent / "report.html"
    path.write_text(render_html(roll_up([load_run(folder)], "component")))
    return path.as_uri()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_every_plot_is_drawn_and_nothing_overflows(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.complaints() == []
    assert browser.requested() == [page]
    drawn = "[...document.querySelectorAll('[data-chart]:has(canvas)')].map(e => e.dataset.chart)"
    assert browser.evaluate(drawn) == CHARTS
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    fits = "[...document.querySelectorAll('canvas')].every(c => c.getBoundingClientRect().right <= innerWidth)"
    assert browser.evaluate(fits)
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 26)" if dark else "rgb(246, 246, 243)")


def test_the_plots_show_the_recorded_values(browser, page):
    browser.open(page)
    colors = """(() => {
      const canvas = document.querySelector('[data-chart="mix-0"] canvas'), seen = {};
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < pixels.length; i += 4) {
        const key = [pixels[i], pixels[i + 1], pixels[i + 2]].join();
        if (pixels[i + 3] === 255) seen[key] = (seen[key] || 0) + 1;
      }
      return seen;
    })()"""
    seen = browser.evaluate(colors)
    areas = [seen.get(color, 0) for color in ("22,74,107", "217,112,26", "29,149,120")]
    shares = [area / sum(areas) for area in areas]
    mixes = [tick.services[0].mix for tick in ticks()]
    recorded = [sum(mix[rank][1] for mix in mixes) / len(mixes) for rank in range(3)]
    assert shares == pytest.approx(recorded, abs=0.02), "the area of each variant is its share of the answers"


def test_the_pointer_reads_values_out(browser, page):
    browser.open(page)
    box = browser.evaluate("""(() => {
      const plot = document.querySelector("[data-chart='power'] .u-over");
      plot.scrollIntoView({block: "center"});
      const box = plot.getBoundingClientRect();
      return [box.left + box.width / 2, box.top + box.height / 2];
    })()""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait(
        "document.querySelector('[data-chart=\"power\"]').parentElement.querySelector('.legend b').textContent"
    )
    assert browser.text("[data-chart='power'] ~ .legend").endswith(" W")
    assert browser.text("[data-chart='intensity'] ~ .legend").endswith(" g/kWh"), "cursors move together"


def test_everything_has_a_name_for_those_who_cannot_see_it(browser, page):
    browser.open(page)
    nameless = """[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length
      + [...document.querySelectorAll('th')].filter(e => !e.scope).length"""
    assert browser.evaluate(nameless) == 0
    assert browser.evaluate("document.documentElement.lang") == "en"
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1


def test_a_line_without_values_has_no_name_in_the_legend(browser, page, tmp_path):
    names = (
        "[...document.querySelectorAll('[data-chart=carbon] ~ .legend li:not([hidden])')].map(e => e.innerText.trim())"
    )
    browser.open(page)
    assert browser.evaluate(names) == ["as run", "baseline"]
    killed = load_run(demo_run(tmp_path / "run", state="killed"))
    (tmp_path / "killed.html").write_text(render_html(roll_up([killed], "component")))
    browser.open((tmp_path / "killed.html").as_uri())
    assert browser.evaluate(names) == ["as run"]
