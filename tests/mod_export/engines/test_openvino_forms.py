"""Products in other forms return the same, and time decides which form an engine has."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from graph_folders import write_graph
from small_graphs import make_spec

from mod_export.config import config_from_toml
from mod_export.engines import openvino as target
from mod_export.engines import openvino_forms
from mod_export.engines.openvino import OpenVino, OpenVinoRunner
from mod_export.engines.openvino_forms import ROWS, Form, fastest_form, write_in
from mod_export.engines.openvino_products import bodies_of, products_of, weight_products
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
    write_in(wide, Form(rows=5))
    assert [p.rows for body in bodies_of(wide) for _, p in weight_products(body)] == [5] * 6
    feeds = [eighths(*shape), np.array(runs)]
    for found, expected in zip(outputs_of(wide, feeds), outputs_of(usual, feeds), strict=True):
        assert found.shape == (*shape[:-1], COLUMNS)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [[6, 1, DEPTH], [2, 3, DEPTH]])
def test_products_with_enough_rows_or_rows_on_two_axes_stay_as_they_are(shape: list[int]) -> None:
    model = two_products(shape)
    before = [node.get_friendly_name() for node in model.get_ordered_ops()]
    write_in(model, Form(rows=5))
    assert [node.get_friendly_name() for node in model.get_ordered_ops()] == before


def scores_of(keys_left: bool, kind: str = "bf16") -> openvino.Model:
    """Scores of the keys of two texts, outside of a condition and in its branches: a product that is transposed if keys
    are on the left.
    """
    import openvino
    from openvino import opset13 as operators

    queries = operators.parameter([2, 3, 4, 8], openvino.Type.f32)
    keys = operators.parameter([2, 3, 16, 8], openvino.Type.f32)
    runs = operators.parameter([], openvino.Type.boolean)
    read = [operators.convert(value, kind) for value in (keys, queries)]

    def scored(keys: Any, queries: Any) -> Any:
        turned = operators.transpose(queries, [0, 1, 3, 2])
        product = operators.matmul(keys, turned, False, False)
        return operators.convert(operators.transpose(product, [0, 1, 3, 2]) if keys_left else product, "f32")

    branches = []
    for factor in (2.0, 3.0):
        inner = [operators.parameter(node.get_output_shape(0), node.get_element_type()) for node in read]
        result = operators.result(operators.multiply(scored(*inner), np.float32(factor)))
        branches.append((openvino.Model([result], inner), inner, result))
    condition = operators.if_op(runs)
    condition.set_then_body(branches[0][0])
    condition.set_else_body(branches[1][0])
    for outer, first, second in zip(read, branches[0][1], branches[1][1], strict=True):
        condition.set_input(outer.output(0), first, second)
    chosen = condition.set_output(branches[0][2], branches[1][2])
    outputs = [operators.result(output) for output in (scored(*read), chosen)]
    return openvino.Model(outputs, [keys, queries, runs])


def kinds(model: openvino.Model) -> list[str]:
    return [node.get_type_name() for body in bodies_of(model) for node in body.get_ordered_ops()]


@pytest.mark.parametrize("runs", [True, False])
def test_scores_with_keys_on_the_right_are_the_same(runs: bool) -> None:
    usual, moved = scores_of(keys_left=True), scores_of(keys_left=True)
    write_in(moved, Form(keys_right=True))
    assert (kinds(usual).count("Transpose"), kinds(moved).count("Transpose")) == (6, 0)
    feeds = [eighths(2, 3, 16, 8), eighths(2, 3, 4, 8), np.array(runs)]
    for found, expected in zip(outputs_of(moved, feeds), outputs_of(usual, feeds), strict=True):
        assert found.shape == (2, 3, 4, 16)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("keys_left", "kind"), [(False, "bf16"), (True, "f32")])
def test_other_products_stay_as_they_are(keys_left: bool, kind: str) -> None:
    model = scores_of(keys_left, kind)
    before = kinds(model)
    write_in(model, Form(keys_right=True))
    assert kinds(model) == before


def measured(
    model: openvino.Model, milliseconds: dict[Form, float], monkeypatch: pytest.MonkeyPatch
) -> tuple[Form, list[Form]]:
    """Returns the chosen form and those that were compiled, where a run takes these times."""
    compiled: list[Form] = []

    def seconds(_: object, form: Form) -> float:
        compiled.append(form)
        return milliseconds[form]

    # The time is the environment of the choice, so the test replaces it. No model is compiled.
    monkeypatch.setattr(openvino_forms, "_seconds", seconds)
    return fastest_form(model, lambda _: None), compiled


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [((20, 17, 18), 4), ((20, 18.5, 18), 5), ((20, 19.5, 19.1), 0), ((9, 10, 11), 0)],
)
def test_more_rows_must_be_clearly_faster(
    milliseconds: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [Form(rows=rows) for rows in (0, *ROWS)]
    times = dict(zip(forms, milliseconds, strict=True))
    assert measured(two_products([1, 1, DEPTH]), times, monkeypatch) == (Form(rows=chosen), forms)


@pytest.mark.parametrize(("milliseconds", "right"), [((20, 19.5), True), ((20, 19.7), False), ((20, 25), False)])
def test_keys_on_the_right_must_be_faster(
    milliseconds: tuple[float, ...], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = [Form(), Form(keys_right=True)]
    times = dict(zip(forms, milliseconds, strict=True))
    assert measured(scores_of(keys_left=True), times, monkeypatch) == (Form(keys_right=right), forms)


def test_rows_are_tried_with_the_keys_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino

    products, scores = two_products([1, 1, DEPTH]), scores_of(keys_left=True)
    both = openvino.Model(
        [*products.get_results(), *scores.get_results()], [*products.get_parameters(), *scores.get_parameters()]
    )
    forms = [Form(), Form(keys_right=True), Form(rows=4, keys_right=True), Form(rows=5, keys_right=True)]
    times = dict(zip(forms, (20, 19, 18.2, 18), strict=True))
    assert measured(both, times, monkeypatch) == (forms[3], forms)


def test_only_a_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino
    from openvino import opset13 as operators

    assert measured(two_products([5, 1, DEPTH]), {}, monkeypatch) == (Form(), [])
    assert measured(scores_of(keys_left=False), {}, monkeypatch) == (Form(), [])
    assert measured(scores_of(True, "f32"), {}, monkeypatch) == (Form(), [])
    x = operators.parameter([1, DEPTH], openvino.Type.f32)
    assert measured(openvino.Model([operators.relu(x)], [x]), {}, monkeypatch) == (Form(), [])


def test_every_form_is_really_compiled_and_run() -> None:
    model, tried = two_products([1, 1, DEPTH]), dict[Form, set[int]]()

    def compiled(form: Form) -> openvino.CompiledModel:
        written = two_products([1, 1, DEPTH])
        write_in(written, form)
        tried[form] = {product.rows for product in products_of(written)}
        return target._core().compile_model(written, "CPU", target._options("bfloat16", 1, target.GROUP))

    assert fastest_form(model, compiled) in tried
    assert tried == {Form(): {1}, Form(rows=4): {4}, Form(rows=5): {5}}


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
    job = replace(job, graph=replace(job.graph, role="decode"))  # Only forms of steps are tried.
    feeds = {"input_ids": np.array([[7]]), "lengths": np.array([1])}
    zeros = {"embedding.weight": np.zeros((40, 32), np.float32)}
    logits = {}
    for rows in (0, 4):
        monkeypatch.setattr(target, "fastest_form", lambda *_, rows=rows: Form(rows=rows))
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
