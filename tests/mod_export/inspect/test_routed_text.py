"""Runs a text through the eager model, refuses texts that cannot be run, and draws the map as lanes of characters."""

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
from mod_export.model.model import Model
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import RoutingMap
from mod_models.checkpoint import random_checkpoint
from mod_models.spec import ModelSpec

Loaded = Callable[[str], Model]


def test_the_map_is_what_the_model_decides(loaded: Loaded) -> None:
    text = "import this, and that"
    model = loaded("routed")
    found = routed_text(model, text)
    assert found is not None
    assert (found.source, found.left_out, found.map.bucket) == ("the text that was given", 0, "b1s21")
    assert found.map.tokens == tuple(text)
    ids_BS = torch.tensor([list(text.encode())])
    with torch.no_grad():
        _, decided = observed(model.module(), ids_BS, torch.tensor([21]))
    assert {layer.layer: layer.routed for layer in found.map.layers} == {
        site: tuple(selection.index_BK[0].tolist()) for site, selection in decided.items()
    }


def test_a_text_or_a_file_of_any_bytes_is_cut_where_it_is_too_long(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"a\r\n\xff")
    given = "the text that was given"
    for text, source, tokens, left_out in (
        (str(path), str(path), "a\r\n\xff", 0),
        ("a\0" + "x" * 4998, given, "a\0" + "x" * 254, 5000 - 256),  # No path can contain a null character.
    ):
        found = routed_text(loaded("routed"), text)
        assert found is not None
        assert (found.source, found.map.tokens, found.left_out) == (source, tuple(tokens), left_out)


def test_without_a_text_it_is_held_out_text(loaded: Loaded) -> None:
    model = loaded("threshold")
    found = routed_text(model, None)
    assert found is not None
    assert found.source == "held-out text"
    sample_1S = model.sample_ids(1, 256, 0)
    assert sample_1S is not None
    assert np.array_equal([ord(token) for token in found.map.tokens], sample_1S[0])


def test_nothing_to_show(loaded: Loaded, tiny_spec: ModelSpec) -> None:
    assert routed_text(loaded("dense"), "a") is None
    other = TransformerModel(random_checkpoint(dataclasses.replace(tiny_spec, vocab_size=300), 0))
    assert routed_text(other, None) is None
    with pytest.raises(UsageError, match=r"^--text: this model's vocabulary of 300 ids is not known to stand for text"):
        routed_text(other, "a")


def test_what_is_no_text_is_refused(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path, model = tmp_path / "some.txt", loaded("routed")
    path.touch()
    with pytest.raises(UsageError, match=r"^--text: .*some\.txt is empty; give at least one character$"):
        routed_text(model, str(path))
    with pytest.raises(UsageError, match=r"^--text: the text that was given is empty"):
        routed_text(model, "")
    monkeypatch.setattr(Path, "read_bytes", refuse)  # Root could read every file.
    with pytest.raises(UsageError, match=r"^--text: .*some\.txt: cannot be read \(Permission denied\)$"):
        routed_text(model, str(path))


def routing_map(tokens: str, **routed: tuple[int, ...]) -> RoutingMap:
    """`l3_mlp=(0, 2)` means that layer 3's MLP ran the first and the third token."""
    layers = [
        {"layer": name[1:].replace("_", ".") if "_" in name else int(name[1:]), "k": 1, "routed": ran, "scores": []}
        for name, ran in routed.items()
    ]
    return RoutingMap.model_validate({"bucket": "b", "tokens": tuple(tokens), "layers": layers})


@pytest.mark.parametrize(
    ("found", "lanes"),
    [
        (
            routing_map("abcd", l1=(0, 3), l12_attention=(1,), l12_mlp=()),
            [("layer 1", "#..#", False), ("layer 12 attention", ".#..", False), ("layer 12 mlp", "....", False)],
        ),
        # There are as many lanes as a token has experts, and no more than three.
        (
            routing_map("abc", l0_expert0=(0, 1), l0_expert1=(1,), l0_expert11=(1,), l2=(2,)),
            [("layer 0 experts", "00.", True), ("", ".1.", True), ("", ".b.", True), ("layer 2", "..#", False)],
        ),
        (
            routing_map("ab", **{f"l0_expert{e}": (0,) for e in range(5)}),
            [("layer 0 experts", "0.", True), ("", "1.", True), ("", "+.", True)],
        ),
        (routing_map("ab", l0_expert36=(1,)), [("layer 0 experts", ".#", True)]),
        (routing_map("ab", l0_expert0=()), [("layer 0 experts", "..", True)]),
    ],
    ids=["parts", "experts", "many experts", "no numeral left", "none ran"],
)
def test_a_lane_marks_what_ran(found: RoutingMap, lanes: list[tuple[str, str, bool]]) -> None:
    assert [(lane.name, lane.marks, lane.experts) for lane in lanes_of(found)] == lanes
    legend = lane_lines(RoutedText(source="s", left_out=0, map=found))[1]
    assert legend.endswith("+ for more of them") is any(experts for *_, experts in lanes)


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
