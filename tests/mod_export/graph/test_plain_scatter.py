"""A reducing scatter becomes a plain one exactly where its targets are unique, and the result stays the same."""

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import TENSORRT, make_spec, op_types, parsed, portable_graph, run

from mod_export.artifacts import Dialect
from mod_export.errors import LimitError
from mod_export.graph.passes.plain_scatter import PlainScatter

SELECT = """
    values, indices = TopK <axis = -1, largest = 1> (scores, k)
    positions, order = TopK <axis = -1, largest = 0> (indices, k)
"""


def flat(stride: int, reduction: str = "add") -> ir.Model:
    """Rows of the flattened stream: position + stride * batch row; 16 tokens in a row."""
    return parsed(
        f"""g (float[2,16] scores, float[40,8] x, float[8,8] u) => (float[40,8] y)
        <int64[1] k = {{4}}, int64[2,1] offset = {{0, {stride}}}, int64[2] shape = {{8, 1}}> {{ {SELECT}
            row = Add (positions, offset)
            target = Reshape (row, shape)
            y = ScatterND <reduction = "{reduction}"> (x, target, u)
        }}"""
    )


def pairs(rows: str) -> ir.Model:
    """(batch row, position) as x[rows, positions] has it."""
    return parsed(
        f"""g (float[2,16] scores, float[2,16,8] x, float[2,4,8] u) => (float[2,16,8] y)
        <int64[1] k = {{4}}, int64[2,1,1] batch = {{{rows}}}, int64[3] shape = {{2, 4, 1}}, int64[1] last = {{-1}}> {{
            {SELECT}
            b = Expand (batch, shape)
            p = Unsqueeze (positions, last)
            target = Concat <axis = -1> (b, p)
            y = ScatterND <reduction = "add"> (x, target, u)
        }}"""
    )


def elements(axis: int, reduction: str = "add") -> ir.Model:
    """scatter_add and scatter_reduce along an axis."""
    return parsed(
        f"""g (float[2,16] scores, float[2,16,8] x, float[2,4,8] u) => (float[2,16,8] y)
        <int64[1] k = {{4}}, int64[3] shape = {{2, 4, 8}}, int64[1] last = {{-1}}> {{ {SELECT}
            p = Unsqueeze (positions, last)
            target = Expand (p, shape)
            y = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, target, u)
        }}"""
    )


UNIQUE = {
    "flat": lambda: flat(16),
    "flat with gaps": lambda: flat(20),
    "flat, mul": lambda: flat(16, "mul"),
    "flat, max": lambda: flat(16, "max"),
    "flat, min": lambda: flat(16, "min"),
    "pairs": lambda: pairs("0, 1"),
    "elements": lambda: elements(1),
    "elements, mul": lambda: elements(-2, "mul"),
}


@pytest.mark.parametrize("make", UNIQUE.values(), ids=UNIQUE.keys())
def test_rewrites_unique_targets(make) -> None:
    model = make()
    rng = np.random.default_rng(0)
    feeds = {str(v.name): rng.normal(size=v.shape.numpy()).astype(np.float32) for v in model.graph.inputs}
    before = run(model, feeds)[0]
    assert PlainScatter().run(model, TENSORRT, "float32") == 1
    assert PlainScatter().ensures(model, TENSORRT, "float32") == []
    assert not any("reduction" in node.attributes for node in model.graph)
    np.testing.assert_array_equal(run(model, feeds)[0], before)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: flat(15),
            r"^ScatterND: ScatterND with reduction 'add' cannot run on TensorRT, and its indices 'target'",
        ),
        (
            lambda: pairs("1, 1"),
            r"not provably unique, so that gather, Add and a plain scatter could give another result",
        ),
        (lambda: elements(0), r"^ScatterElements: .* write back with index_put\(accumulate=False\) at the positions"),
        (lambda: elements(0, "max"), r"gather, Max and a plain scatter"),
        (
            lambda: parsed(
                """g (float[9,8] x, int64[4,1] target, float[4,8] u) => (float[9,8] y)
                { y = ScatterND <reduction = "add"> (x, target, u) }"""
            ),
            r"its indices 'target' are not provably unique",
        ),
    ],
    ids=["overlapping rows", "same row twice", "along the wrong axis", "wrong axis, max", "an input"],
)
def test_refuses_the_others(make, problem: str) -> None:
    model = make()
    before = op_types(model)
    with pytest.raises(LimitError, match=problem):
        PlainScatter().run(model, TENSORRT, "float32")
    assert op_types(model) == before


def test_leaves_plain_scatters_alone() -> None:
    model = portable_graph(make_spec(), 2, 24)
    assert op_types(model).count("ScatterND") == 1
    assert PlainScatter().run(model, TENSORRT, "float32") == 0


def test_applies_where_scatters_cannot_reduce() -> None:
    assert PlainScatter().applies(TENSORRT, "float16")
    assert not PlainScatter().applies(Dialect(name="any", max_opset=23), "float16")


def test_says_what_is_left() -> None:
    assert PlainScatter().ensures(flat(16), TENSORRT, "float32") == ["ScatterND still scatters with reduction 'add'"]
