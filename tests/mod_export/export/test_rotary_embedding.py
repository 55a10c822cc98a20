"""The written-out rotation becomes one operator, and nothing that only looks like one does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import make_spec, parsed, portable_graph, run

from mod_export.engines.ort import OrtCpu
from mod_export.export.passes.rotary_embedding import RotaryEmbedding

ROTATION = (
    "parts = Constant <value_ints: ints = [4, 4]> () a, b = Split <axis = -1> (x, parts) "
    "ac = Mul (a, cos) bs = Mul (b, sin) d = Sub (ac, bs) bc = Mul (b, cos) as = Mul (a, sin) s = Add (bc, as) "
    "y = Concat <axis = -1> (d, s)"
)


def rotation(table: str, body: str = ROTATION) -> ir.Model:
    return parsed(f"g (float[2,3,5,8] x, float[{table}] cos, float[{table}] sin) => (float[2,3,5,8] y) {{ {body} }}")


def feeds(table: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = [int(size) for size in table.split(",")]
    angle = rng.standard_normal(sizes).astype(np.float32)
    x = rng.standard_normal((2, 3, 5, 8), dtype=np.float32)
    return {"x": x, "cos": np.cos(angle), "sin": np.sin(angle)}


def rewritten(model: ir.Model) -> int:
    return RotaryEmbedding().run(model, OrtCpu.dialect, "float32")


@pytest.mark.parametrize("table", ["5,4", "2,1,5,4", "1,1,5,4"])
def test_the_rotation_is_the_same(table: str) -> None:
    model = rotation(table)
    assert rewritten(model) == 1
    assert Counter(node.op_type for node in model.graph)["RotaryEmbedding"] == 1
    expected = run(rotation(table), feeds(table))[0]
    np.testing.assert_allclose(run(model, feeds(table))[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        ROTATION.replace("Sub (ac, bs)", "Add (ac, bs)"),
        ROTATION.replace("Mul (b, cos)", "Mul (a, cos)"),
        ROTATION.replace("Concat <axis = -1> (d, s)", "Concat <axis = -1> (s, d)"),
        ROTATION.replace("Sub (ac, bs)", "Sub (bs, ac)"),
        ROTATION.replace("as = Mul (a, sin)", "as = Mul (a, cos)"),
        ROTATION.replace("Split <axis = -1> (x, parts)", "Split <axis = -1> (x, parts) c = Neg (a)").replace(
            "Mul (a, sin)", "Mul (c, sin)"
        ),
    ],
    ids=["sum of both", "one half twice", "halves swapped", "the other sign", "cosine twice", "another value"],
)
def test_what_is_no_rotation_stays(body: str) -> None:
    model = rotation("5,4", body)
    assert rewritten(model) == 0
    assert list(RotaryEmbedding().ensures(model, OrtCpu.dialect, "float32")) == []


def test_cosines_of_each_head_stay() -> None:
    assert rewritten(rotation("3,5,4")) == 0


def test_an_opset_without_the_operator() -> None:
    model = rotation("5,4")
    model.opset_imports[""] = 22
    assert rewritten(model) == 0


def test_tables_are_prepared_once_for_all_layers() -> None:
    model = portable_graph(make_spec().dense(), 2, 16)
    assert rewritten(model) == 4
    count = Counter(node.op_type for node in model.graph)
    assert count["RotaryEmbedding"] == 4
    assert count["Expand"] == 2
