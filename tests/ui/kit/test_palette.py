"""Colours people can tell apart: contrast against the card in light and dark, distance under colour blindness."""

import itertools
import re

import numpy as np
import pytest

from joulery.ui.kit.html import static_text

CSS = static_text("joulery.css")


def palette(theme):
    light, dark = re.findall(r":root \{([^}]*)\}", CSS)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light + dark if theme == "dark" else light))


def linear(color):
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    luminance = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (luminance[1] + 0.05) / (luminance[0] + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable(theme):
    colors = palette(theme)
    for ink, paper in [
        ("ink", "page"),
        ("ink", "card"),
        ("soft", "page"),
        ("soft", "card"),
        ("accent", "card"),
        ("accent", "accent-wash"),
        ("good", "good-wash"),
        ("warn", "warn-wash"),
        ("bad", "bad-wash"),
        ("good", "card"),
        ("bad", "card"),
        ("warn", "card"),
    ]:
        assert contrast(colors[ink], colors[paper]) >= 4.5, (ink, paper)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_areas_stand_out_from_the_card(theme):
    colors = palette(theme)
    names = [f"v{i}" for i in range(6)] + ["power", "grid-line", "ours", "baseline", "slo", "latency"]
    names += ["measured", "modelled", "assumed", "idle", "unattributed"]
    for name in names:
        assert contrast(colors[name], colors["card"]) >= 3, name


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "names",
    [
        ("v0", "v1", "v2", "v3", "v4", "v5"),
        ("ours", "baseline"),
        ("latency", "slo"),
        ("measured", "modelled", "assumed", "idle", "unattributed"),
    ],
)
def test_colours_that_meet_in_one_chart_differ_for_everybody(theme, blindness, names):
    colors = palette(theme)
    seen = {name: lab(BLINDNESS[blindness] @ linear(colors[name])) for name in names}
    for one, other in itertools.combinations(names, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 15, (one, other)
