"""Attention in blocks of queries gives the same numbers, and computes fewer of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import attention, make_spec, op_types, parsed, portable_graph, random_feeds, run

from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.attention import QueryBlocks, splittable_tokens
from mod_export.measure.cost import attention_sizes
from mod_export.types import TargetLimits

PLAIN = TargetLimits(name="tested", max_opset=23)


def blocks(**sizes: int) -> TargetLimits:
    return replace(PLAIN, query_blocks=tuple((int(tokens[1:]), block) for tokens, block in sizes.items()))


def scores_of(model: ir.Model) -> int:
    return sum(attention_sizes(node, "").scores for node in model.graph if node.op_type == "Attention")


@pytest.mark.parametrize(
    ("block", "attributes", "large"),
    [
        (1, "is_causal = 1, scale = 0.3", True),
        (3, "is_causal = 1", True),
        (8, "is_causal = 1, softcap = 2.0", False),
        (15, "is_causal = 1, scale = 0.3", False),
        (16, "is_causal = 1", True),
    ],
)
def test_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, attributes: str, block: int, large: bool) -> None:
    if large:
        monkeypatch.setattr("mod_export.graph.rewrites.attention.SHARED_MASK_BYTES", 0)
    model = attention(2, 4, 2, 17, 8, attributes)
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    left = ["Attention still computes scores that its mask hides"]
    assert QueryBlocks().ensures(model, blocks(T17=block), "float32") == left
    assert QueryBlocks().run(model, blocks(T17=block), "float32") == 1
    assert QueryBlocks().ensures(model, blocks(T17=block), "float32") == []
    assert ("Less" in op_types(model)) is large  # It hides the masks from constant folding.
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)


def test_only_scores_that_can_be_seen_and_the_rest_of_a_block_are_computed() -> None:
    model = attention(1, 2, 1, 64, 4)
    whole = scores_of(model)
    needed = attention_sizes(model.graph[0], "").needed
    QueryBlocks().run(model, blocks(T64=16), "float32")
    assert (whole, needed, scores_of(model)) == (2 * 64 * 64, 64 * 65, 2 * 64 * (64 + 16) // 2)


def test_infinite_and_missing_numbers_of_later_tokens_do_not_reach_earlier_ones() -> None:
    model = attention(1, 1, 1, 8, 4)
    feeds = random_feeds(model)
    QueryBlocks().run(model, blocks(T8=4), "float32")
    sound = run(model, feeds)[0]
    feeds["v"][0, 0, 4:] = np.nan
    np.testing.assert_array_equal(run(model, feeds)[0][0, 0, :4], sound[0, 0, :4])


def test_layers_of_one_length_share_their_masks() -> None:
    model = portable_graph(make_spec().dense())
    assert QueryBlocks().run(model, blocks(T16=4), "float32") == 2
    assert op_types(model).count("Where") == 1
    stored = [value.shape.numpy() for name, value in model.graph.initializers.items() if name.startswith("constant/")]
    assert all(np.prod(shape, dtype=int) <= 16 for shape in stored)


def test_late_masks_are_shared_and_depend_on_the_data() -> None:
    model = portable_graph(make_spec().dense())
    assert QueryBlocks().run(model, replace(blocks(T16=4), late_masks=True), "float32") == 2
    assert (op_types(model).count("Where"), op_types(model).count("Less")) == (1, 1)


def test_only_the_lengths_that_are_named() -> None:
    model = portable_graph(make_spec())
    assert apply_rewrites(model, blocks(T16=8), "float32")["query_blocks"] == 1
    assert sorted(splittable_tokens(node) or 0 for node in model.graph if node.op_type == "Attention") == [0, 0, 4]


@pytest.mark.parametrize(
    ("keys", "mask", "call", "block"),
    [
        (4, "", "Attention (q, k, v)", 2),
        (4, ", bool[4,4] m", "Attention <is_causal = 1> (q, k, v, m)", 2),
        (6, "", "Attention <is_causal = 1> (q, k, v)", 2),
        (4, "", "Attention <is_causal = 1> (q, k, v)", 4),
    ],
    ids=["not causal", "with a mask", "more keys than queries", "a block as long as the text"],
)
def test_leaves_alone_what_it_need_not_split(keys: int, mask: str, call: str, block: int) -> None:
    inputs = f"float[1,2,4,8] q, float[1,2,{keys},8] k, float[1,2,{keys},8] v{mask}"
    model = parsed(f"g ({inputs}) => (float[1,2,4,8] y) {{ y = {call} }}")
    assert QueryBlocks().run(model, blocks(T4=block), "float32") == 0


@pytest.mark.parametrize("block", [1, 3, 4])
def test_heads_may_lie_side_by_side(block: int) -> None:
    """Tensors (B, T, heads * E) are cut into the same blocks, along another dimension."""
    text = (
        "g (float[2,8,32] q, float[2,8,16] k, float[2,8,16] v) => (float[2,8,32] y) "
        "{ y = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2> (q, k, v) }"
    )
    model = parsed(text)
    feeds = random_feeds(model)
    assert QueryBlocks().run(model, blocks(T8=block), "float32") == 1
    assert op_types(model).count("Attention") == -(-8 // block)
    np.testing.assert_allclose(run(model, feeds)[0], run(parsed(text), feeds)[0], atol=1e-6)
