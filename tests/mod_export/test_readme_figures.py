"""The pictures of the README can be made of a finished build folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from headless_chromium import BROWSER
from make_figures import main, small_svg


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_pictures_are_small_and_tell_the_speedup(built: Path, tmp_path: Path) -> None:
    assert main(built, tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.png", "speedup.svg"}
    assert all(path.stat().st_size < 300_000 for path in tmp_path.iterdir())
    svg = (tmp_path / "speedup.svg").read_text(encoding="utf-8")
    assert "predicted (FLOPs)" in svg
    assert re.search(r"\d\.\d\dx \[\d", svg)


def test_paths_are_rounded_and_nothing_else() -> None:
    svg = '<svg>\n  <path d="M 0.123456 -7.500001\nL 1 2 \nz\n" style="x"/>\n <use x="0.015625"/>\n</svg>'
    assert small_svg(svg) == '<svg>\n<path d="M 0.12 -7.5 L 1 2 z" style="x"/>\n<use x="0.015625"/>\n</svg>'
