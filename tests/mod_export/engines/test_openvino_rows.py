"""Products that are given more rows return the same, and whether they are is decided by time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from graph_folders import write_graph
from small_graphs import make_spec

from mod_export.config import config_from_toml
from mod_export.engines import openvino as target
from mod_export.engines import openvino_rows
from mod_export.engines.openvino import OpenVino, OpenVinoRunner
from mod_export.engines.openvino_products import bodies_of, products_of, weight_products
from mod_export.engines.openvino_rows import CANDIDATES, fastest_rows, widen
from mod_export.types import Bucket, Engine, Variant

if TYPE_CHECKING:
    import openvino

CONFIG = config_from_toml(None)
DEPTH, COLUMNS = 24, 40
pytestmark = pytest.mark.skipif(
    "BF16" not in target._capabilities(), reason="this processor has no instructions for bfloat16"
)


def eighths(*shape: int) -> np.ndarray:
    """Random numbers that bfloat16 holds exactly, and whose products have few enough bits for float32."""
    return np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32) / 8


def product(value: Any, columns: int, seed: int) -> Any:
    import openvino
    from openvino import opset13 as operators

    weight = operators.constant(np.roll(eighths(value.get_output_shape(0)[-1], columns), seed), openvino.Type.f32)
    return operators.matmul(value, operators.convert(weight, "bf16"), False, False)


def two_products(shape: list[int]) -> openvino.Model:
    """Two products that read the same rows, outside of a condition and in both of its branches."""
    import openvino
    from openvino import opset13 as operators

    x = operators.parameter(shape, openvino.Type.f32)
    runs = operators.parameter([], openvino.Type.boolean)
    rows = operators.convert(x, "bf16")
    outside = operators.add(product(rows, COLUMNS, 0), product(rows, COLUMNS, 1))
    branches = []
    for seed in (2, 3):
        inner = operators.parameter(shape, openvino.Type.bf16)
        result = operators.result(operators.add(product(inner, COLUMNS, seed), product(inner, COLUMNS, seed + 2)))
        branches.append((openvino.Model([result], [inner]), inner, result))
    condition = operators.if_op(runs)
    condition.set_then_body(branches[0][0])
    condition.set_else_body(branches[1][0])
    condition.set_input(rows.output(0), branches[0][1], branches[1][1])
    chosen = condition.set_output(branches[0][2], branches[1][2])
    return openvino.Model([operators.convert(outside, "f32"), operators.convert(chosen, "f32")], [x, runs])


def outputs_of(model: openvino.Model, feeds: list[np.ndarray]) -> list[np.ndarray]:
    compiled = target._core().compile_model(model, "CPU", target._options("bfloat16", 1, target.GROUP))
    results = compiled(feeds)
    return [results[port] for port in compiled.outputs]


@pytest.mark.parametrize("shape", [[1, 1, DEPTH], [3, 1, DEPTH], [1, 3, DEPTH], [2, DEPTH]])
@pytest.mark.parametrize("runs", [True, False])
def test_products_with_more_rows_return_the_same(shape: list[int], runs: bool) -> None:
    usual, wide = two_products(shape), two_products(shape)
    widen(wide, 5)
    assert [p.rows for body in bodies_of(wide) for _, p in weight_products(body)] == [5] * 6
    feeds = [eighths(*shape), np.array(runs)]
    for found, expected in zip(outputs_of(wide, feeds), outputs_of(usual, feeds), strict=True):
        assert found.shape == (*shape[:-1], COLUMNS)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [[6, 1, DEPTH], [2, 3, DEPTH]])
def test_products_with_enough_rows_or_rows_on_two_axes_stay_as_they_are(shape: list[int]) -> None:
    model = two_products(shape)
    before = [node.get_friendly_name() for node in model.get_ordered_ops()]
    widen(model, 5)
    assert [node.get_friendly_name() for node in model.get_ordered_ops()] == before


def measured(
    model: openvino.Model, milliseconds: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[int]]:
    """Returns the chosen number and those that were compiled, where a run takes these times."""
    compiled: list[int] = []

    def seconds(_: object, rows: int) -> float:
        compiled.append(rows)
        return milliseconds[rows]

    monkeypatch.setattr(openvino_rows, "_seconds", seconds)
    return fastest_rows(model, lambda _: None), compiled  # type: ignore[arg-type, return-value]  # Nothing is compiled.


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({0: 20, 4: 17, 5: 18}, 4),
        ({0: 20, 4: 18.5, 5: 18}, 5),
        ({0: 20, 4: 19.5, 5: 19.1}, 0),
        ({0: 9, 4: 10, 5: 11}, 0),
    ],
)
def test_more_rows_must_be_clearly_faster(
    milliseconds: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(two_products([1, 1, DEPTH]), milliseconds, monkeypatch) == (chosen, [0, *CANDIDATES])


def test_a_model_with_a_product_of_many_rows_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino
    from openvino import opset13 as operators

    assert measured(two_products([5, 1, DEPTH]), {}, monkeypatch) == (0, [])
    x = operators.parameter([1, DEPTH], openvino.Type.f32)
    assert measured(openvino.Model([operators.relu(x)], [x]), {}, monkeypatch) == (0, [])


def test_a_model_is_really_run() -> None:
    model = two_products([1, 1, DEPTH])
    options = target._options("bfloat16", 1, target.GROUP)
    assert fastest_rows(model, lambda _: target._core().compile_model(model, "CPU", options)) in (0, *CANDIDATES)


def rows_of_products(compiled: openvino.CompiledModel) -> set[int]:
    """The rows of the bfloat16 products that OpenVINO runs."""
    nodes = compiled.get_runtime_model().get_ordered_ops()
    about = [{name: str(value.value) for name, value in node.get_rt_info().items()} for node in nodes]
    products = [
        node
        for node, info in zip(nodes, about, strict=True)
        if (info["layerType"], info["runtimePrecision"]) == ("FullyConnected", "bf16")
    ]
    return {int(np.prod(list(node.get_output_shape(0))[:-1])) for node in products}


def test_an_engine_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is compiled again with other weights."""
    bucket = Bucket(1, 1)
    (tmp_path / "engines").mkdir()
    job = write_graph(tmp_path, make_spec(), bucket, OpenVino.limits, "bfloat16")
    feeds = {"input_ids": np.array([[7]]), "lengths": np.array([1])}
    zeros = {"embedding.weight": np.zeros((40, 32), np.float32)}
    logits = {}
    for rows in (0, 4):
        monkeypatch.setattr(target, "fastest_rows", lambda *_, rows=rows: rows)
        path = f"engines/{rows}.blob"
        OpenVino().build(job, Variant(dtype="bfloat16"), tmp_path / path, CONFIG)
        header = json.loads((tmp_path / path).read_bytes().partition(b"\n")[0])
        assert header["rows"] == rows
        assert {about["rows"] for about in header["products"]} == {rows or 1}
        engine = Engine(
            target="openvino", model="mod", bucket=bucket, dtype="bfloat16", path=path,
            weights="graphs/weights-bfloat16.data",
        )  # fmt: skip
        load = partial(OpenVino().load, tmp_path, engine, CONFIG, 1)
        with load() as runner, load(zeros) as silenced:
            for opened in (runner, silenced):
                assert isinstance(opened, OpenVinoRunner)
                assert rows_of_products(opened._opened()) == {rows or 1}
            logits[rows] = runner.run(feeds)["logits"]
            assert not silenced.run(feeds)["logits"].any()
    assert np.abs(logits[0]).max() > 0.1
    np.testing.assert_allclose(logits[4], logits[0], atol=0.05)
    graph = target._core().read_model(str(tmp_path / job.graph.path))
    assert {p.rows for p in products_of(graph)} == {1}
