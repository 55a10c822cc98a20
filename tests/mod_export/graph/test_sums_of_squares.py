"""A 16-bit graph sums squares in float32."""

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import narrowed, parsed, run

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
LAST = "int64[1] last = {-1}, float small = {1e-12}, float two = {2.0}, float three = {3.0}"
SQUARES = {
    "a norm": "n = ReduceL2 (h, last)",
    "a mean of powers": "p = Pow (h, two) m = ReduceMean (p, last) n = Sqrt (m)",
    "a sum of products": "p = Mul (h, h) m = ReduceSum (p, last) n = Sqrt (m)",
    "a sum of squares": "m = ReduceSumSquare (h, last) n = Sqrt (m)",
}


def of_rows(text: str) -> str:
    return f"""g (float[1,2,4] x, float[1,2,4] other) => (float[1,2,4] y) <{LAST}> {{
        h = Add (x, x) {text} largest = Max (n, small) d = Div (h, largest) y = Neg (d)
    }}"""


@pytest.mark.parametrize("name", SQUARES)
def test_squares_are_summed_in_float32(name: str) -> None:
    """The square of a number above 255 is infinite in float16, and anything divided by it is 0."""
    model = narrowed(of_rows(SQUARES[name]))
    dtypes = {value.name: value.dtype for node in model.graph for value in node.outputs}
    assert {dtypes[key] for key in ("p", "m", "n", "largest") if key in dtypes} == {FLOAT}
    assert (dtypes["h"], dtypes["d"]) == (FLOAT16, FLOAT16)
    x = np.array([[[400, -500, 1, 2], [1e-3, 0, 2e-3, 0]]], np.float32)
    inputs = {"x": x, "other": x}
    np.testing.assert_allclose(run(model, inputs)[0], run(parsed(of_rows(SQUARES[name])), inputs)[0], rtol=2e-3)


@pytest.mark.parametrize(
    "text",
    ["p = Pow (h, three) n = ReduceMean (p, last)", "p = Mul (h, other) n = ReduceSum (p, last)"],
    ids=["cubes", "products"],
)
def test_other_sums_are_as_narrow_as_the_rest(text: str) -> None:
    model = narrowed(of_rows(text))
    dtypes = {value.name: value.dtype for node in model.graph for value in node.outputs}
    assert {dtypes[key] for key in ("p", "n", "largest")} == {FLOAT16}
