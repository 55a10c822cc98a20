"""A text through the eager model, every text that cannot be one, and the map of it as lanes of characters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from observing import observed

from mod_export.errors import UsageError
from mod_export.inspect.routed_text import RoutedText, lane_lines, lanes_of, routed_text, token_marks
from mod_export.results.structure import RoutingMap
from mod_export.sources.model import Model
from mod_export.types import Site
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec

Loaded = Callable[[str], Model]


def test_the_map_is_what_the_model_decides(loaded: Loaded) -> None:
    text = "import this, and that"
    model = loaded("routed").loaded
    found = routed_text(model, text)
    assert found is not None
    assert (found.source, found.left_out, found.map.bucket) == ("the text that was given", 0, "b1s21")
    assert found.map.tokens == tuple(text)
    ids_BS = torch.tensor([list(text.encode())])
    with torch.no_grad():
        _, decided = observed(model.module(), ids_BS, torch.tensor([21]))
    assert {layer.layer: layer.routed for layer in found.map.layers} == {
        site: tuple(one.index_BK[0].tolist()) for site, one in decided.items()
    }


def test_a_file_is_read_as_bytes(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"a\r\n\xff")
    found = routed_text(loaded("routed").loaded, str(path))
    assert found is not None
    assert found.map.tokens == ("a", "\r", "\n", "\xff")
    assert found.source == str(path)


def test_what_is_too_long_is_cut(loaded: Loaded) -> None:
    found = routed_text(loaded("routed").loaded, "x" * 5000)
    assert found is not None
    assert (len(found.map.tokens), found.left_out) == (256, 5000 - 256)


def test_a_text_can_hold_what_no_path_can(loaded: Loaded) -> None:
    found = routed_text(loaded("routed").loaded, "a\0b")
    assert found is not None
    assert found.map.tokens == ("a", "\0", "b")


def test_without_a_text_it_is_held_out_text(loaded: Loaded) -> None:
    model = loaded("threshold").loaded
    found = routed_text(model, None)
    assert found is not None
    assert found.source == "held-out text"
    sample_1S = model.sample_ids(1, 256, 0)
    assert sample_1S is not None
    assert np.array_equal([ord(token) for token in found.map.tokens], sample_1S[0])


def test_nothing_to_show(loaded: Loaded, tiny_spec: ModelSpec) -> None:
    assert routed_text(loaded("dense").loaded, "a") is None
    other = LoadedTransformer(random_checkpoint(dataclasses.replace(tiny_spec, vocab_size=300), 0))
    assert routed_text(other, None) is None
    with pytest.raises(UsageError, match=r"^--text: this model's vocabulary of 300 ids is not known to stand for text"):
        routed_text(other, "a")


def test_an_empty_text_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(UsageError, match=r"^--text: .*empty\.txt is empty; give at least one character$"):
        routed_text(loaded("routed").loaded, str(path))
    with pytest.raises(UsageError, match=r"^--text: the text that was given is empty"):
        routed_text(loaded("routed").loaded, "")


def test_a_file_that_cannot_be_read_is_named(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("a")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # A test that runs as root can read everything.
    with pytest.raises(UsageError, match=r"^--text: .*gone\.txt: cannot be read \(Permission denied\)$"):
        routed_text(loaded("routed").loaded, str(path))


def routing_map(tokens: str, **routed: tuple[int, ...]) -> RoutingMap:
    """`l3_mlp=(0, 2)`: layer 3's MLP ran the first and the third token."""

    def site(name: str) -> Site:
        number, _, part = name.removeprefix("l").partition("_")
        return f"{number}.{part}" if part else int(number)

    layers = [
        {"layer": site(name), "k": len(positions), "routed": positions, "scores": []}
        for name, positions in routed.items()
    ]
    return RoutingMap.model_validate({"bucket": "b", "tokens": tuple(tokens), "layers": layers})


def test_a_lane_marks_what_ran() -> None:
    lanes = lanes_of(routing_map("abcd", l1=(0, 3), l12_attention=(1,), l12_mlp=()))
    assert [(lane.name, lane.marks) for lane in lanes] == [
        ("layer 1", "#..#"), ("layer 12 attention", ".#.."), ("layer 12 mlp", "...."),
    ]  # fmt: skip
    assert not any(lane.experts for lane in lanes)


def test_experts_share_as_many_lanes_as_a_token_has_experts() -> None:
    lanes = lanes_of(routing_map("abc", l0_expert0=(0, 1), l0_expert1=(1,), l0_expert11=(1,), l2=(2,)))
    assert [(lane.name, lane.marks, lane.experts) for lane in lanes] == [
        ("layer 0 experts", "00.", True), ("", ".1.", True), ("", ".b.", True), ("layer 2", "..#", False),
    ]  # fmt: skip


def test_more_experts_than_are_shown() -> None:
    many = {f"l0_expert{e}": (0,) for e in range(5)}
    assert [lane.marks for lane in lanes_of(routing_map("ab", **many))] == ["0.", "1.", "+."]
    assert lanes_of(routing_map("ab", l0_expert36=(1,)))[0].marks == ".#"
    assert lanes_of(routing_map("ab", l0_expert0=()))[0].marks == ".."


def test_every_token_is_one_character() -> None:
    found = routing_map("a").model_copy(update={"tokens": ("word", "", "\n", "\x1b", "\xe9")})
    assert token_marks(found) == "w\N{MIDDLE DOT}\N{MIDDLE DOT}\N{MIDDLE DOT}\xe9"


def test_a_long_text_is_cut_into_pieces() -> None:
    found = routing_map("x" * 100, l1=(95, 96))
    lines = lane_lines(RoutedText(source="a.txt", left_out=1234, map=found))
    assert lines == [
        "routing of a.txt: 100 tokens, 1,234 more are left out",
        "# ran, . skipped",
        "",
        "      0  " + "x" * 96,
        "layer 1  " + "." * 95 + "#",
        "",
        "     96  xxxx",
        "layer 1  #...",
    ]


def test_the_legend_tells_of_experts() -> None:
    found = routing_map("ab", l0_expert0=(0,))
    assert lane_lines(RoutedText(source="s", left_out=0, map=found))[1].endswith("+ for more of them")
