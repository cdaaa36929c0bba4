"""The house style: colours and looks that can be told apart, files that can be written, pages that can hold them."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from linattn_cli import plotting
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.output import CliError
from linattn_cli.plotting import BLACK, FAULT, GREY, PALETTE, Panel, Picture

# Machado, Oliveira & Fernandes 2009: what is left of linear RGB where one kind of cone is missing.
SIGHT = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
NOTICED = 10.0
"""Distance in CIELAB that is seen at a glance; about 2 is just noticeable side by side."""


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_kind_of_sight(sight):
    seen = {colour: lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in {BLACK, *PALETTE}}
    near = [(a, b) for a, b in itertools.combinations(sorted(seen), 2) if np.linalg.norm(seen[a] - seen[b]) < NOTICED]
    assert near == []


def test_the_measure_of_colours_can_fail():
    red, green = (np.array(SIGHT["deuteranopia"]) @ linear(colour) for colour in ("#C02020", "#6E6E00"))
    assert np.linalg.norm(lab(red) - lab(green)) < 25 < np.linalg.norm(lab(linear("#C02020")) - lab(linear("#6E6E00")))


def test_lines_have_three_times_the_contrast_of_paper():
    for colour in {*PALETTE, GREY, FAULT}:
        luminance = linear(colour) @ np.array([0.2126, 0.7152, 0.0722])
        assert 1.05 / (luminance + 0.05) >= 3, colour


def test_mixers_differ_in_print_without_colour():
    looks = plotting.looks(MIXERS)
    assert len({(look["marker"], str(look["linestyle"])) for look in looks.values()}) == len(MIXERS)
    assert looks["softmax"]["color"] == BLACK
    assert [name for name, look in looks.items() if look["color"] == BLACK] == ["softmax"]


def test_a_mixer_looks_the_same_in_every_picture():
    alone, among = plotting.looks(["vla chunk"]), plotting.looks(["softmax sdpa", "hla2 chunk", "vla chunk"])
    assert alone["vla chunk"] == among["vla chunk"]


def test_variants_of_a_mixer_have_its_colour_and_another_line():
    names = ["vla", "vla:penalty=none", "vla, d_head 8", "mine chunk"]
    looks = plotting.looks(names)
    assert len({looks[name]["color"] for name in names[:3]}) == 1
    assert len({(looks[name]["marker"], str(looks[name]["linestyle"])) for name in names}) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.pdf", r"--plot must end in .png or .svg, got 'x.pdf'"),
        ("x", r"--plot must end in .png or .svg"),
        ("no/such/x.png", "there is no folder"),
        ("folder.svg", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(CliError, match=message):
        plotting.check_plot_path(tmp_path / name)


def test_a_place_that_takes_no_files_is_refused():
    with pytest.raises(CliError, match=r"cannot write /proc/x\.png"):
        plotting.check_plot_path(Path("/proc/x.png"))


def test_checking_leaves_nothing_behind_and_keeps_what_is_there(tmp_path):
    plotting.check_plot_path(tmp_path / "new.PNG")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.svg").write_text("kept")
    plotting.check_plot_path(tmp_path / "old.svg")
    assert (tmp_path / "old.svg").read_text() == "kept"
    plotting.check_plot_path(tmp_path / "run" / "x.png", coming=tmp_path / "run")


def picture(**more):
    def draw(axes):
        axes.plot([1, 2, 4], [1, 2, 3], label="a <b> & c")
        plotting.power_ticks(axes.xaxis, [1, 2, 4])
        axes.set_ylabel("y & more")

    return Picture("A title", "caption: " + "x " * 200, [Panel("first", draw, **more), Panel("second", draw)])


def test_pictures_are_saved_in_both_formats_with_their_caption(tmp_path):
    plotting.save(tmp_path / "a.png", picture())
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert b"caption: x x" in data
    plotting.save(tmp_path / "a.svg", picture())
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    assert root.tag.endswith("svg")
    assert "caption: x x" in (tmp_path / "a.svg").read_text()


def test_the_same_picture_is_the_same_bytes(tmp_path):
    for name in ("a.svg", "b.svg"):
        plotting.save(tmp_path / name, picture())
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_full_disk_is_the_error_that_exit_code_4_is_made_of(tmp_path):
    (tmp_path / "x.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        plotting.save(tmp_path / "x.png", picture())


def test_drawings_of_a_page_share_no_identifier_and_name_nothing_outside():
    found = plotting.svgs(picture(), "p1") + plotting.svgs(picture(), "p2")
    assert [title for title, _ in found] == ["first", "second"] * 2
    identifiers = [name for _, svg in found for name in re.findall(r'\bid="([^"]*)"', svg)]
    assert len(identifiers) == len(set(identifiers)) > 20
    for _, svg in found:
        ET.fromstring(svg.replace("<svg", '<svg xmlns:xlink="x"', 1))
        used = {*re.findall(r"url\(#([^)]*)\)", svg), *re.findall(r'href="#([^"]*)"', svg)}
        assert used
        assert used <= set(identifiers)
        assert set(re.findall(r"https?://[^\"' ]*", svg)) == {"http://www.w3.org/2000/svg"}
        assert "a &lt;b&gt; &amp; c" in svg
        assert 'aria-label="' in svg


def test_panels_go_two_in_a_row_and_a_wide_one_has_its_row():
    panel, wide = Panel("p", lambda axes: None), Panel("w", lambda axes: None, wide=True)
    assert plotting._layout([panel]) == [[0]]
    assert plotting._layout([panel] * 3) == [[0, 1], [2, 2]]
    assert plotting._layout([panel, wide, panel, panel]) == [[0, 0], [1, 1], [2, 3]]


def test_what_is_missing_or_not_finite_is_not_drawn():
    points = [(1, None), (2, float("nan")), (3, float("inf")), (4, 5.0), (None, 1.0)]
    assert plotting.present(points) == [(4, 5.0)]


def test_ticks_stay_apart():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plotting.power_ticks(axes.xaxis, [256, 257, 512, 1024, 2048])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["256", "512", "1k", "2k"]
