"""A step that writes its own cache leaves the same cache as a step whose caller writes the rows, in 16 bits too."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest
import torch
from generating import WINDOW, generating_model
from small_graphs import parsed, session
from step_graphs import prefill_graph, step_graph
from test_decoding_graphs import random_state

from mod_export.engines import ENGINES
from mod_export.errors import GraphError
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import apply_rewrites
from mod_export.graph.rewrites.cached_attention import LOGITS, SLOTS, CacheInPlace, is_cache
from mod_export.graph.target import check_limits
from mod_export.types import DType, TargetLimits
from mod_models.cache import COUNTS, cache_layout, step_inputs, step_outputs
from mod_models.generate import write_rows
from mod_models.step import DecodeStep, slots_of_step

IN_PLACE = ENGINES["tensorrt-rtx"].limits
ROWS_OUT = TargetLimits(name="rows out", max_opset=23, scatter_reduction=False, branches=True)
TOLERANCE: dict[DType, float] = {"float32": 5e-5, "float16": 3e-2}
STATES = 12


def rewritten(model: ir.Model, limits: TargetLimits, dtype: DType) -> ir.Model:
    """Runs all rewrites, and checks that they change nothing a second time."""
    apply_rewrites(model, limits, dtype)
    check_limits(model, limits, dtype)
    assert set(apply_rewrites(model, limits, dtype).values()) <= {0}
    return model


@pytest.mark.parametrize(
    ("name", "dtype", "rows"),
    [
        ("predictor", "float16", 4),
        pytest.param("dense", "float32", 4, marks=pytest.mark.slow),
        pytest.param("compact positions", "float16", 1, marks=pytest.mark.slow),
        pytest.param("compact positions", "float32", 4, marks=pytest.mark.slow),
        pytest.param("several blocks by predictors", "float16", 4, marks=pytest.mark.slow),
        pytest.param("several blocks, nested, threshold", "float32", 4, marks=pytest.mark.slow),
        pytest.param("experts in routed MLPs", "float32", 1, marks=pytest.mark.slow),
        pytest.param("experts in routed MLPs", "float16", 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_leaves_the_cache_of_the_eager_step(name: str, dtype: DType, rows: int) -> None:
    model = generating_model(name, torch.float32)
    spec = model.spec
    step = DecodeStep(spec, rows, WINDOW, slots_of_step(spec, rows, WINDOW)).sharing(model)
    graph = rewritten(step_graph(name, rows, "fair"), IN_PLACE, dtype)
    assert graph.opset_imports[""] == 24
    running, outputs = session(graph), [value.name for value in graph.graph.outputs]
    capacity = torch.tensor([spec.k_by_layer(WINDOW)[site] for site in step.sites])
    seen = {"compared": 0, "kept": 0, "not kept": 0}
    for seed in range(STATES):
        inputs = random_state(spec, rows, seed)
        if seed % 3 == 2:
            inputs[1][seed % rows] = -1
        if seed % 3 == 1 and step.sites:
            inputs[-1][seed % rows] = capacity  # All its slots are used, the last one too.
        cache = {name: tensor for name, tensor in zip(step_inputs(spec, WINDOW), inputs, strict=True) if is_cache(name)}
        for tensor in cache.values():
            tensor.copy_(tensor.half())  # Numbers that both dtypes represent exactly.
        with torch.no_grad():
            expected = dict(zip(step_outputs(spec), step(*inputs), strict=True))
        kinds = {name: np.dtype(dtype) for name in cache}
        feeds = {
            name: tensor.numpy().astype(kinds.get(name, tensor.numpy().dtype))
            for name, tensor in zip(step_inputs(spec, WINDOW), inputs, strict=True)
        }
        returned = dict(zip(outputs, running.run(None, feeds), strict=True))
        if step.sites and not np.array_equal(returned["wanted"], expected["wanted"].numpy()):
            assert dtype == "float16", seed  # A score is within rounding of 0.
            continue
        rows_out = {name: expected[name.replace("_", "_row_")] for name in cache}
        write_rows(cache, rows_out, expected["slots"])
        for output in ("slots", "new_counts", "ran") if step.sites else ("slots",):
            np.testing.assert_array_equal(returned[output], expected[output].numpy())
        for name, tensor in cache.items():
            present = returned[f"present_{name}"]
            assert present.dtype == np.dtype(dtype)
            np.testing.assert_allclose(present.astype(np.float32), tensor.numpy(), rtol=0, atol=TOLERANCE[dtype])
            slot_B = expected["slots"][:, int(name.rpartition("_")[2])]
            untouched = np.ones(present.shape, bool)
            for row, slot in enumerate(slot_B):
                untouched[row, :, slot] = slot < 0
            np.testing.assert_array_equal(present[untouched], tensor.numpy()[untouched])
            seen["kept"] += int((slot_B >= 0).sum())
            seen["not kept"] += int((slot_B < 0).sum())
        active = inputs[1].numpy() >= 0
        scale = max(1.0, float(expected["logits"].abs().max()))
        logits, wanted = returned["logits"][active], expected["logits"].numpy()[active]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE[dtype] * scale)
        seen["compared"] += 1
    assert seen["compared"] >= STATES - 3
    assert seen["kept"] > 0
    assert seen["not kept"] > 0


@pytest.mark.parametrize("name", ["predictor", pytest.param("experts in routed MLPs", marks=pytest.mark.slow)])
def test_a_step_in_16_bits_decides_in_float32_and_remembers_in_16(name: str) -> None:
    graph = rewritten(step_graph(name, 4, "fair"), ROWS_OUT, "float16").graph
    cache = [value for value in (*graph.inputs, *graph.outputs) if is_cache(value.name)]
    assert len(cache) == 4 * 3
    assert {value.dtype for value in cache} == {ir.DataType.FLOAT16}
    assert next(value for value in graph.outputs if value.name == "logits").dtype == ir.DataType.FLOAT
    decided = [node for node in graph.all_nodes() if node.op_type in ("Greater", "TopK")]
    assert decided
    assert {value.dtype for node in decided for value in node.inputs} <= {ir.DataType.FLOAT, ir.DataType.INT64}
    for node in decided:
        above = node.inputs[0]
        while (producer := above.producer()) is not None and producer.op_type != "MatMul":
            assert producer.op_type != "Cast"  # From 16 bits: a score would have been rounded before.
            above = producer.inputs[0]
        assert producer is not None
        assert producer.outputs[0].dtype == ir.DataType.FLOAT
    products = [node for node in graph.all_nodes() if node.op_type == "MatMul" and node.graph is not graph]
    assert products
    assert ir.DataType.FLOAT16 in {node.outputs[0].dtype for node in products}


@pytest.mark.slow
def test_a_prefill_takes_the_cache_that_a_step_takes() -> None:
    model = rewritten(prefill_graph("predictor"), IN_PLACE, "bfloat16")
    prefill = model.graph
    assert model.opset_imports[""] == 23  # It has no TensorScatter, because it writes no row.
    step = rewritten(step_graph("predictor", 4, "fair"), IN_PLACE, "bfloat16").graph
    ports = {value.name: value for value in step.inputs if is_cache(value.name)}
    taken = {value.name: value for value in prefill.inputs if is_cache(value.name)}
    assert taken.keys() == ports.keys()
    for name, value in ports.items():
        _, G, L, E = value.shape
        # A prefill has room behind the slots of a text, as much as it reads at once.
        assert taken[name].shape == (1, G, L + WINDOW, E)
    rows = [value for value in prefill.outputs if is_cache(value.name)]
    assert len(rows) == len(ports)
    assert {value.dtype for value in (*ports.values(), *taken.values(), *rows)} == {ir.DataType.BFLOAT16}


def test_writes_stand_outside_of_branches_and_wait_for_the_logits() -> None:
    """TensorRT takes these writes nowhere else, and TensorRT-RTX 1.7.1 needs this dependency to order them."""
    graph = rewritten(step_graph("predictor", 4, "fair"), IN_PLACE, "float32").graph
    writes = [node for node in graph.all_nodes() if node.op_type == "TensorScatter"]
    caches = {value.name for value in graph.inputs if is_cache(value.name)}
    assert {node.outputs[0].name for node in writes} == {f"present_{name}" for name in caches}
    assert len(writes) == 2 * 3
    logits = next(value for value in graph.outputs if value.name == "logits").producer()
    for node in writes:
        assert node.graph is graph
        assert node.inputs[0].is_graph_input()
        assert node.outputs[0].is_graph_output()
        assert node.attributes.get_int("axis", 0) == -2
        seen, frontier = {node}, [node]
        while frontier:
            producers = [producer for producer in frontier.pop().predecessors() if producer not in seen]
            seen |= set(producers)
            frontier += producers
        assert logits in seen
    assert [len(branches_of(node)) for node in graph if node.op_type == "If"] == [2, 2]


STEP = """g (float[2,1,3,4] keys_0, float[2,1,4] x, int64[2,1] s, float[2,5] l) =>
(float[2,5] logits, float[2,1,4] keys_row_0, int64[2,1] slots) {
    logits = Neg (l)
    keys_row_0 = Neg (x)
    slots = Identity (s)
}"""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("float[2,1,3,4] keys_0", "float[2,1,3,4] keys_1", "row (2, 1, 4), input keys_0 None, outputs slots (2, 1)"),
        ("float[2,1,3,4] keys_0", "float[2,1,3,5] keys_0", "row (2, 1, 4), input keys_0 (2, 1, 3, 5), outputs"),
        ("slots", "places", "outputs slots None and logits (2, 5); expected (B, G, E), (B, G, L, E), (B, layers)"),
        ("logits", "hidden", "outputs slots (2, 1) and logits None; expected"),
        ("float[2,1,4] x", "float[N,1,4] x", "row None, input keys_0 (2, 1, 3, 4)"),
        ("keys_row_0", "keys_row_1", "row (2, 1, 4), input keys_1 None"),
    ],
)
def test_refuses_rows_of_no_cache(old: str, new: str, what: str) -> None:
    text = STEP.replace(old, new)
    model = parsed(text.replace("float[2,1,4] keys_row", "float[N,1,4] keys_row") if "N" in new else text)
    with pytest.raises(GraphError, match=rf"^keys_row_\d: no cache fits this row: .*{re.escape(what)}"):
        CacheInPlace().run(model, IN_PLACE, "float32")
    left = [f"output {row.name} is left for the caller to write" for row in model.graph.outputs if is_cache(row.name)]
    assert CacheInPlace().ensures(model, IN_PLACE, "float32") == left


def test_names_are_those_of_a_step_and_nothing_else_is_a_cache() -> None:
    spec = generating_model("predictor").spec
    layout = [entry.name for entry in cache_layout(spec, 1, WINDOW) if entry.name != COUNTS]
    assert [name for name in step_inputs(spec, WINDOW) if is_cache(name)] == layout
    assert [name for name in step_outputs(spec) if is_cache(name)] == [entry.replace("_", "_row_") for entry in layout]
    assert {LOGITS, SLOTS} <= set(step_outputs(spec))
    names = [None, "counts", "logits", "slots", "input_ids", "keys", "keys_a", "monkeys_1"]
    assert not any(map(is_cache, names))
