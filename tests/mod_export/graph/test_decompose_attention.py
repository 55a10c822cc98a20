"""Attention in primitive operators gives the same numbers, and unknown forms of it are refused."""

import dataclasses
import re

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, attention, feeds, make_spec, op_types, parsed, portable_graph, random_feeds, run

from mod_export.errors import GraphError
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.attention import DecomposeAttention
from mod_export.graph.target import check_limits
from mod_export.types import FLOAT_DTYPES, AttentionKernels, TargetLimits

GROUPED = TargetLimits(
    name="a target that takes rows of groups", max_opset=23, attention_dtypes=frozenset(), grouped_rows=True,
    late_masks=True, query_blocks=((16, 6),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "attributes"),
    [
        ((2, 4, 2, 16, 8), "is_causal = 1, scale = 0.3"),
        ((2, 4, 2, 16, 8), "is_causal = 0"),
        ((1, 3, 3, 7, 6), "is_causal = 1"),
        ((2, 6, 1, 5, 4), "is_causal = 1"),
        ((1, 1, 1, 1, 2), "is_causal = 1"),
    ],
    ids=["gqa", "gqa, not causal", "mha", "mqa", "one"],
)
@pytest.mark.parametrize("limits", [TENSORRT, GROUPED], ids=["groups", "rows"])
def test_gives_the_same_numbers(sizes: tuple[int, int, int, int, int], attributes: str, limits: TargetLimits) -> None:
    model = attention(*sizes, attributes)
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert DecomposeAttention().ensures(model, limits, "float32") == ["Attention is still one Attention"]
    assert DecomposeAttention().run(model, limits, "float32") == 1
    assert DecomposeAttention().ensures(model, limits, "float32") == []
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)
    ranks = {len(value.shape) for node in model.graph for value in node.outputs if value.shape is not None}
    assert (5 in ranks) is (limits is TENSORRT and sizes[1] != sizes[2])


def masked(mask: str, attributes: str = "is_causal = 0", heads: int = 2, more: str = "") -> ir.Model:
    """A graph of Attention with a mask, 3 queries, 5 keys, and values that are wider than keys."""
    return parsed(
        f"""g (float[2,2,3,4] q, float[2,{heads},5,4] k, float[2,{heads},5,6] v, {mask}) => (float[2,2,3,6] y)
        {more} {{ y = Attention <{attributes}> (q, k, v, m) }}"""
    )


@pytest.mark.parametrize("limits", [TENSORRT, GROUPED], ids=["groups", "rows"])
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("attributes", ["is_causal = 0", "is_causal = 1, scale = 0.4"])
@pytest.mark.parametrize(
    "mask", ["bool[3,5] m", "bool[2,1,3,5] m", "bool[2,3,5] m", "float[2,2,3,5] m", "float[1,1,3,5] m", "float[3,5] m"]
)
def test_a_mask_hides_the_same_keys(mask: str, attributes: str, heads: int, limits: TargetLimits) -> None:
    model = masked(mask, attributes, heads)
    feeds = random_feeds(model)
    feeds["m"] = feeds["m"] > 0 if mask.startswith("bool") else feeds["m"]
    # A query that sees no key.
    feeds["m"][..., 1, :] = False if mask.startswith("bool") else -np.inf
    before = run(model, feeds)[0]
    assert (before[..., 1, :] == 0).all()
    assert DecomposeAttention().run(model, limits, "float32") == 1
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mask", ["bool[3,5] m", "float[3,5] m"])
def test_a_query_that_sees_no_key_is_zero_in_openvino_too(mask: str) -> None:
    """OpenVINO's maximum of a row of minus infinities is finite."""
    openvino = pytest.importorskip("openvino")
    model = masked(mask)
    seen = np.array([[True] * 5, [False] * 5, [False, True, False, True, False]])
    inputs = {**random_feeds(model), "m": seen if mask.startswith("bool") else np.where(seen, 0, -np.inf)}
    inputs = {name: array.astype(np.float32) if array.dtype == float else array for name, array in inputs.items()}
    before = run(model, inputs)[0]
    DecomposeAttention().run(model, GROUPED, "float32")
    core = openvino.Core()
    graph = core.read_model(ir.to_proto(model).SerializeToString())
    # A processor with instructions for bfloat16 would compute in it by default.
    compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    output = compiled(inputs)[0]
    np.testing.assert_allclose(output, before, rtol=1e-4, atol=1e-5)
    assert (output[:, :, 1] == 0).all()


@pytest.mark.parametrize("limits", [TENSORRT, GROUPED], ids=["groups", "rows"])
@pytest.mark.parametrize("shape", [(1, 5), (2, 1, 1, 5), (2, 2, 1, 5)])
def test_one_row_of_a_mask_is_for_all_queries(shape: tuple[int, ...], limits: TargetLimits) -> None:
    """ONNX Runtime's Attention does not take such a mask."""
    narrow, whole = (masked(f"float{[*shape[:-2], rows, 5]} m", heads=1) for rows in (1, 3))
    feeds = random_feeds(narrow)
    wanted = run(whole, {**feeds, "m": np.repeat(feeds["m"], 3, axis=-2)})[0]
    assert DecomposeAttention().run(narrow, limits, "float32") == 1
    np.testing.assert_allclose(run(narrow, feeds)[0], wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("hidden", "guarded"), [("0", True), ("1", False)])
def test_a_fixed_mask_that_hides_no_query_needs_no_guard(hidden: str, guarded: bool) -> None:
    model = masked("float[1] unused", more=f"<bool[3,5] m = {{1,1,1,1,1, {hidden},0,0,0,0, 1,0,1,0,1}}>")
    feeds = random_feeds(model)
    before = run(model, feeds)[0]
    assert DecomposeAttention().run(model, TENSORRT, "float32") == 1
    assert ("Equal" in op_types(model)) is guarded
    np.testing.assert_allclose(run(model, feeds)[0], before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(("hidden", "guarded"), [("0", True), ("1", False)])
@pytest.mark.parametrize("limits", [TENSORRT, GROUPED], ids=["groups", "rows"])
def test_a_fixed_part_of_a_mask_can_show_every_query_a_key(
    limits: TargetLimits, hidden: str, guarded: bool, axis: int
) -> None:
    """As the mask of tokens that continue a cache: which slots are in use is computed, and each token sees itself."""
    model = parsed(
        f"""g (float[2,2,3,4] q, float[2,1,5,4] k, float[2,1,5,6] v, bool[3,2] used)
        => (float[2,2,3,6] y, float[2,2,3,6] z)
        <bool[3,3] own = {{1,0,0, {hidden},0,0, 1,1,1}}, int64[2] axes = {{0, 1}}>
        {{
            joined = Concat <axis = {axis}> (used, own)
            m = Unsqueeze (joined, axes)
            y = Attention (q, k, v, m)
            z = Attention (q, k, v, m)
        }}"""
    )
    for node in model.graph:
        node.name = f"of_{node.outputs[0].name}"
    feeds = random_feeds(model)
    feeds["used"] = np.array([[1, 1], [0, 0], [1, 0]], bool)
    before = run(model, feeds)
    assert DecomposeAttention().run(model, limits, "float32") == 2
    assert ("Equal" in op_types(model)) is guarded
    for found, wanted in zip(run(model, feeds), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    if not guarded:
        # Both attentions add the same numbers.
        assert op_types(model).count("Where") == 1


@pytest.mark.parametrize(
    ("mask", "attributes", "left"), [("bool[3,5] m", "is_causal = 0", 1), ("bool[3,5] m", "is_causal = 1", 0)]
)
def test_decomposes_16_bit_attention_under_two_masks(mask: str, attributes: str, left: int) -> None:
    limits = dataclasses.replace(TENSORRT, attention_kernels=AttentionKernels(narrowest=4, widest=256))
    model = parsed(
        f"""g (float[2,2,3,4] q, float[2,2,5,4] k, float[2,2,5,4] v, {mask}) => (float[2,2,3,4] y)
        {{ y = Attention <{attributes}> (q, k, v, m) }}"""
    )
    assert DecomposeAttention().run(model, limits, "float16") == 1 - left
    wider = masked(mask)
    assert DecomposeAttention().run(wider, limits, "float16") == 1


def test_blocks_of_one_length_share_one_comparison_and_store_no_square_mask() -> None:
    model = portable_graph(make_spec())
    before = run(model, feeds())
    assert DecomposeAttention().run(model, TENSORRT, "float32") == 2
    assert op_types(model).count("GreaterOrEqual") == 2  # T = 16 in the dense block, 4 in the routed one
    stored = [v.shape.numpy() for v in model.graph.initializers.values() if v.name and v.name.startswith("constant/")]
    assert all(np.prod(shape, dtype=int) <= 16 for shape in stored)
    for output, expected in zip(run(model, feeds()), before, strict=True):
        np.testing.assert_allclose(output, expected, atol=2e-5)
    dense = portable_graph(make_spec().dense())
    assert DecomposeAttention().run(dense, TENSORRT, "float32") == 2
    assert op_types(dense).count("GreaterOrEqual") == 1


def test_blocks_of_queries_share_masks_that_no_engine_can_store() -> None:
    """With grouped rows, each mask is made once, and it is known that every query sees a key."""
    model = portable_graph(make_spec().dense())
    before = run(model, feeds())
    applied = apply_rewrites(model, GROUPED, "float32")
    assert (applied["query_blocks"], applied["decompose_attention"]) == (2, 2 * 3)
    types = op_types(model)
    # Both layers share the masks of the three blocks.
    assert (types.count("Less"), types.count("Where"), types.count("Expand")) == (1, 1, 3)
    assert not {"Equal", "ReduceMax", "Attention"} & set(types)
    for output, expected in zip(run(model, feeds()), before, strict=True):
        np.testing.assert_allclose(output, expected, atol=2e-5)


def test_applies_where_the_dialect_has_no_kernel() -> None:
    assert [dtype for dtype in FLOAT_DTYPES if DecomposeAttention().applies(TENSORRT, dtype)] == ["float32"]
    primitives = dataclasses.replace(TENSORRT, attention_dtypes=frozenset())
    assert [dtype for dtype in FLOAT_DTYPES if DecomposeAttention().applies(primitives, dtype)] == list(FLOAT_DTYPES)


QKV = "float[1,2,4,8] q, float[1,2,4,8] k, float[1,2,4,8] v"
LONGER = QKV.replace("4,8] k", "6,8] k").replace("4,8] v", "5,8] v")
FLAT = "float[1,4,16] q, float[1,4,16] k, float[1,4,16] v"


@pytest.mark.parametrize(
    ("inputs", "attributes", "words"),
    [
        (
            QKV + ", bool[4,4] m, float[1,2,1,8] p, float[1,2,1,8] r",
            "",
            "Attention: Attention with input 4 (p), input 5 (r) cannot be put into primitive operators",
        ),
        (QKV, ", softcap = 20.0", "Attention with softcap 20.0 cannot be put into"),
        (QKV, ", softmax_precision = 10", "with attribute softmax_precision cannot be put"),
        (FLAT, ", q_num_heads = 2", "Attention with attribute q_num_heads cannot be put"),
        (LONGER, "", "query (1, 2, 4, 8), key (1, 2, 6, 8) and value (1, 2, 5, 8): the batch, "),
        (QKV.replace("4,8] k", "T,8] k"), "", "Attention has k of shape [1,2,T,8], expected a static shape"),
        (FLAT, "", "on shapes [(1, 4, 16), (1, 4, 16), (1, 4, 16)], expected (batch, heads, tokens, width) each"),
    ],
)
def test_refuses_what_it_does_not_know(inputs: str, attributes: str, words: str) -> None:
    call = f"Attention <is_causal = 0{attributes}> ({', '.join(re.findall(r'] (.)', inputs))})"
    # Not `parsed`: shapes of nodes that ONNX does not allow cannot be inferred.
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : 23]> g ({inputs}) => (float[A,B,C,D] y) {{ y = {call} }}'
    )
    with pytest.raises(GraphError, match=re.escape(words)):
        DecomposeAttention().run(model, TENSORRT, "float32")


def test_refuses_an_attention_whose_scores_are_used() -> None:
    model = parsed(f"g ({QKV}) => (float[A,B,C,D] y) {{ y, p, z = Attention (q, k, v) w = Neg (p) }}")
    with pytest.raises(GraphError, match=r"Attention with output 1 \(p\) cannot be put"):
        DecomposeAttention().run(model, TENSORRT, "float32")


@pytest.mark.parametrize("odd", [np.nan, np.inf, -1e30])
def test_the_mask_does_not_depend_on_the_number_that_it_pretends_to_depend_on(odd: float) -> None:
    """Tokens of the second batch row see no later token, for any value of the first query."""
    model = attention(2, 2, 1, 5, 4)
    feeds = random_feeds(model)
    feeds["q"][0, 0, 0, 0] = odd
    before = run(model, feeds)[0]
    DecomposeAttention().run(model, TENSORRT, "float32")
    np.testing.assert_allclose(run(model, feeds)[0][1], before[1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("width", "left"), [(8, 0), (9, 1), (256, 1), (257, 0)])
def test_decomposes_16_bit_attention_of_a_width_without_a_kernel(width: int, left: int) -> None:
    limits = dataclasses.replace(TENSORRT, attention_kernels=AttentionKernels(narrowest=9, widest=256))
    model = attention(1, 2, 1, 4, width)
    assert DecomposeAttention().applies(limits, "float16")
    assert DecomposeAttention().run(model, limits, "float16") == 1 - left
    assert op_types(model).count("Attention") == left
    assert DecomposeAttention().ensures(model, limits, "float16") == []


def test_nothing_is_known_of_kernels_for_heads_side_by_side() -> None:
    limits = dataclasses.replace(TENSORRT, attention_kernels=AttentionKernels(narrowest=9, widest=256, fewest_heads=2))
    model = parsed(
        """g (float16[1,4,16] q, float16[1,4,16] k, float16[1,4,16] v) => (float16[1,4,16] y)
        { y = Attention <q_num_heads = 1, kv_num_heads = 1> (q, k, v) }"""
    )
    assert DecomposeAttention().run(model, limits, "float16") == 0
    check_limits(model, limits, "float16")
