import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joulery.domain.serving.timeline import Tick
from joulery.ui.kit.html import Html, content_hash, data_block, head, join, static_text, tag, whole_page


def test_text_is_escaped_and_html_is_not():
    assert tag("p", "a < b & c", Html("<b>d</b>")) == "<p>a &lt; b &amp; c<b>d</b></p>"
    assert tag("td", ["x", ["y", None]], title='"<') == '<td title="&quot;&lt;">xy</td>'


def test_attributes():
    assert tag("input", required=True, disabled=False, value=None, type="text") == '<input required type="text">'
    assert tag("div", class_="a", aria_label="b", data_chart=3) == '<div class="a" aria-label="b" data-chart="3"></div>'
    assert tag("rect", x=1.5) == '<rect x="1.5"/>'
    assert tag("circle", tag("title", "t")) == "<circle><title>t</title></circle>"
    assert tag("meta", name="viewport") == '<meta name="viewport">'


def test_join_flattens():
    assert join(["a", (Html("<i>"), None, ["b"])]) == "a<i>b"


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none()))
def test_a_data_block_cannot_be_left_and_comes_back(value):
    block = data_block("d", value)
    inside = re.fullmatch(r'<script type="application/json" id="d">(.*)</script>', block, re.DOTALL)[1]
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == value


def test_a_data_block_of_nouns():
    block = data_block("d", {"ticks": (Tick(1.0, 1.0),)})
    tick = json.loads(block.partition(">")[2].rpartition("<")[0])["ticks"][0]
    assert tick["power_w"] is None
    assert tick["quality"] == "measured"


def test_a_whole_page_says_what_it_is_and_who_wrote_it():
    text = whole_page(head("two < three", "p{margin:0}"), tag("body", tag("p", "&")))
    assert re.fullmatch(
        r'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">.*'
        r'<meta name="generator" content="joulery [^"]+">'
        r"<title>two &lt; three · joulery</title><style>p\{margin:0\}</style></head><body><p>&amp;</p></body></html>\n",
        text,
    )


def test_the_hash_is_that_of_the_content_security_policy():
    assert content_hash("alert('Hello, world.');") == "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='"


def test_static_files_are_there_with_their_licence():
    assert "MIT License" in static_text("uplot.LICENSE")
    assert "uPlot" in static_text("uplot.min.js")[:200]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("uplot.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
        ("uplot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
    ],
)
def test_the_vendored_library_is_the_published_one(name, digest):
    """uPlot 1.6.32, dist/uPlot.iife.min.js and dist/uPlot.min.css of the npm package, unchanged."""
    assert hashlib.sha256(static_text(name).encode()).hexdigest() == digest
