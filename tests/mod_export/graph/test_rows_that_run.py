"""The routed parts of a step compute only the rows that run, and every row gets the same as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from generating import WINDOW
from small_graphs import parsed, session
from step_graphs import step_graph, step_graph_of
from test_cached_attention import in_place, wide
from test_decoding_graphs import random_state

from mod_export.engines.ort import OrtCpu
from mod_export.graph.nodes import branches_of
from mod_export.graph.rewrites import REWRITES, apply_rewrites
from mod_export.graph.rewrites.rows_that_run import RowsThatRun
from mod_export.types import VACANT
from mod_models.cache import step_inputs
from mod_models.generation_spec import for_generation

BEFORE = tuple(rewrite for rewrite in REWRITES if not isinstance(rewrite, RowsThatRun))
ROWS, STATES = 4, 6


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph.all_nodes()]


@pytest.mark.parametrize(
    ("name", "width", "parts"),
    [
        ("predictor", 16, 2),
        # Attention is written out for narrow heads, so only what follows it is gathered.
        pytest.param("predictor", 4, 2, marks=pytest.mark.slow),
        pytest.param("routed apart by predictors", 8, 4, marks=pytest.mark.slow),
        pytest.param("MLP routed", 16, 2, marks=pytest.mark.slow),
        pytest.param("compact positions", 16, 2, marks=pytest.mark.slow),
        # The experts choose for all rows.
        ("experts in routed blocks", 16, 2),
    ],
)
def test_a_step_returns_the_same(name: str, width: int, parts: int) -> None:
    usual, gathered = step_graph_of(wide(name, width), ROWS), step_graph_of(wide(name, width), ROWS)
    apply_rewrites(usual, OrtCpu.limits, "float32", BEFORE)
    assert apply_rewrites(gathered, OrtCpu.limits, "float32")["rows_that_run"] == parts
    assert kinds(gathered).count("NonZero") == parts
    assert RowsThatRun().run(gathered, OrtCpu.limits, "float32") == 0
    spec = for_generation(wide(name, width), WINDOW)
    running = [session(model) for model in (usual, gathered)]
    ran = set()
    for seed in range(STATES):
        state = random_state(spec, ROWS, seed)
        if seed % 2:
            state[1][seed % ROWS] = VACANT
        feeds = dict(zip(step_inputs(spec, WINDOW), (tensor.numpy() for tensor in state), strict=True))
        active_B = feeds["positions"] >= 0
        expected, found = (in_place(each, feeds, 1 if width > 4 else 0) for each in running)
        ran |= {int(number) for number in expected["ran"].sum(0)}
        for output in ("ran", "wanted", "new_counts", "slots"):
            np.testing.assert_array_equal(found[output], expected[output])
        np.testing.assert_allclose(found["logits"][active_B], expected["logits"][active_B], rtol=1e-5, atol=1e-5)
    assert len(ran) > 2


def test_one_row_has_nothing_to_gather() -> None:
    model = step_graph("predictor", 1)
    assert apply_rewrites(model, OrtCpu.limits, "float32")["rows_that_run"] == 0


PART = """
g (float[4,1,8] x, bool[4] ran, bool any, float[8,8] w) => (float[4,1,8] y) {{
    y = If (any) <
        then_branch = then_graph () => (float[4,1,8] chosen) {{
            two = Constant <value_ints = [1, 2]> ()
            mark = Unsqueeze (ran, two)
            {body}
            chosen = Where (mark, new, x)
        }},
        else_branch = else_graph () => (float[4,1,8] left) {{ left = Identity (x) }}
    >
}}
"""


def part(body: str) -> ir.Model:
    """A part whose `body` computes `new` from `x` and the weight `w`."""
    model = parsed(PART.format(body=body))
    weight = model.graph.inputs.pop()
    weight.const_value = ir.tensor(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), name="w")
    model.graph.initializers.add(weight)
    for node in model.graph.all_nodes():
        for branch in branches_of(node):
            for inner in branch:
                for value in inner.outputs:
                    if inner.op_type != "Constant":
                        shape = (4, 1, 1) if value.name == "mark" else (4, 1, 8)
                        value.shape = ir.Shape(shape)
                        value.type = ir.TensorType(ir.DataType.BOOL if value.name == "mark" else ir.DataType.FLOAT)
    return model


def outputs(model: ir.Model, ran_B: list[bool]) -> Any:
    x_B1D = np.random.default_rng(1).standard_normal((4, 1, 8)).astype(np.float32)
    return session(model).run(None, {"x": x_B1D, "ran": np.array(ran_B), "any": np.array(any(ran_B))})[0]


@pytest.mark.parametrize("ran_B", [[True] * 4, [False, True, False, True], [False, False, True, False], [False] * 4])
def test_rows_that_run_and_others(ran_B: list[bool]) -> None:
    body = "wide = MatMul (x, w) half = Sigmoid (wide) product = Mul (wide, half) new = Add (product, x)"
    gathered = part(body)
    assert RowsThatRun().run(gathered, OrtCpu.limits, "float32") == 1
    np.testing.assert_allclose(outputs(gathered, ran_B), outputs(part(body), ran_B), rtol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "zero = Constant <value_int = 0> () wide = MatMul (x, w) mixed = CumSum (wide, zero) new = Add (mixed, x)",
        "wide = MatMul (x, w) new = LogSoftmax <axis = 0> (wide)",
        "half = Sigmoid (x) new = Mul (x, half)",
    ],
    ids=["rows are summed", "the result is no sum of rows", "no product"],
)
def test_a_part_that_mixes_rows_or_has_no_product_stays(body: str) -> None:
    model = part(body)
    before = kinds(model)
    assert RowsThatRun().run(model, OrtCpu.limits, "float32") == 0
    assert kinds(model) == before
