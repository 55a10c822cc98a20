"""The picture of a model. What it looks like is for people; that bars and marks are where they must be is read back."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from mod_export.errors import UsageError
from mod_export.inspect.layers import Layers
from mod_export.inspect.picture import check_matplotlib, render_png
from mod_export.inspect.routed_text import RoutedText, routed_text
from mod_export.model.model import Model
from mod_export.report.pages import light_colours

Loaded = Callable[[str], Model]


def pixels(png: bytes) -> Any:
    """RGBA of 0 to 1, (height, width, 4)."""
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(png))


def share_of_colour(png: bytes, name: str) -> float:
    colour = [int(light_colours()[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float((abs(pixels(png)[..., :3] - colour) < 2 / 255).all(-1).mean())


@pytest.mark.parametrize("kind", ["dense", "staged MoDE"])
def test_every_part_has_its_colour(loaded: Loaded, layers: Callable[[str], Layers], kind: str) -> None:
    model = loaded(kind)
    png = render_png(model, layers(kind), routed_text(model.loaded, "a text of \xa3 $x$ and\n more"))
    drawn = {part for part in ("mlp", "experts", "head", "attention") if share_of_colour(png, part) > 1e-4}
    assert drawn == {"head", "attention", "mlp" if kind == "dense" else "experts"}


def test_tokens_that_run_are_marked_below_the_chart(loaded: Loaded, layers: Callable[[str], Layers]) -> None:
    model, found = loaded("routed"), layers("routed")
    routed = routed_text(model.loaded, "x" * 128)
    assert routed is not None
    all_of_them = [layer.model_copy(update={"routed": tuple(range(128))}) for layer in routed.map.layers]
    full = RoutedText(source="s", left_out=3, map=routed.map.model_copy(update={"layers": tuple(all_of_them)}))
    k = 16
    marked, whole = (share_of_colour(render_png(model, found, one), "mod") for one in (routed, full))
    assert marked / whole == pytest.approx(k / 128, rel=0.1)
    alone, both = (pixels(render_png(model, found, one)).shape for one in (None, routed))
    assert alone[0] < both[0]
    assert alone[1] == both[1]


def test_without_matplotlib_there_is_one_clear_error(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # What Python does where it is not installed.
    with pytest.raises(UsageError, match=r"^--png draws with matplotlib, .* install mod-export\[figures\], or use"):
        check_matplotlib()
    found = invoke("inspect", checkpoint, "--png", tmp_path / "a.png")
    assert found.exit_code == 2
    assert found.stderr.startswith("error: --png draws with matplotlib")
    assert not (tmp_path / "a.png").exists()
    assert invoke("inspect", checkpoint, "--html", tmp_path / "a.html").exit_code == 0
