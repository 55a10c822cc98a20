"""Block sizes of attention are timed on the real kernels; another size is chosen only where it is clearly faster."""

from __future__ import annotations

import pytest

from mod_export.engines import ort_attention
from mod_export.engines.ort_attention import AttentionShape, default_block, fastest_block, time_blocks


def shape(tokens: int) -> AttentionShape:
    return AttentionShape(batch=1, heads=2, kv_heads=1, tokens=tokens, width=16)


def test_short_texts_are_not_split() -> None:
    assert time_blocks(shape(127), 1) == {}
    assert fastest_block(shape(127), {}) == default_block(127) == 127


def test_every_way_is_timed() -> None:
    ms = time_blocks(shape(128), 1)
    assert set(ms) == {32, 64, 128}
    assert all(value > 0 for value in ms.values())


def test_a_text_whose_scores_take_too_much_memory_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_attention, "MOST_SCORES", 2 * 128 * 128 - 1)
    assert set(time_blocks(shape(128), 1)) == {32, 64}


@pytest.mark.parametrize(
    ("ms", "block"),
    [({32: 9.6, 64: 10.0, 512: 20.0}, 64), ({32: 9.4, 64: 10.0, 512: 20.0}, 32), ({64: 10.0, 512: 9.0}, 512), ({}, 64)],
    ids=["not clearly faster", "clearly faster", "whole", "not timed"],
)
def test_the_default_stays_unless_another_is_clearly_faster(ms: dict[int, float], block: int) -> None:
    assert fastest_block(shape(512), ms) == block


def test_a_shape_has_a_name_for_its_step() -> None:
    assert str(AttentionShape(1, 8, 4, 512, 64)) == "b1h8g4t512e64"
