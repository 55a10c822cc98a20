from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from captures import captured_module
from observing import observed
from small_graphs import Does, TwoWays, make_model, parsed
from torch import Tensor

from mod_export.engines.ort_session import OrtRunner, session_from_onnx
from mod_export.errors import GraphError
from mod_export.graph import onnx_export
from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import (
    IR_VERSION,
    OPSET,
    assert_capacity,
    check_model,
    onnx_from_captured,
)
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.weights import WeightsFile, bind_weights, state_of, write_weights
from mod_export.types import TOKEN_INPUTS, Bucket
from mod_models.declarations import LEARNED_ROUTERS, POSITIONS, ROUTER_INPUTS
from mod_models.routing import COMBINES, GATES
from mod_models.spec import CAPACITY_RULES, ModelSpec, RoutingSpec

BUCKET = Bucket(3, 24)
ROUTED = RoutingSpec(layers=(0, 1), capacity=0.25)
CAPACITIES: Mapping[str, float] = {"floor": 0.25, "floor_min1": 0.01, "strict_floor": 0.3, "ceil": 0.3, "absolute": 5}


def variants() -> list[RoutingSpec]:
    """Every variant of every declaration at least once, in changing combinations."""
    tables: dict[str, Any] = {
        "gate": GATES, "combine": COMBINES, "router": LEARNED_ROUTERS, "capacity_rule": CAPACITY_RULES,
        "positions": POSITIONS, "router_input": ROUTER_INPUTS,
    }  # fmt: skip
    columns = zip(*map(itertools.cycle, tables.values()), strict=False)
    rows = [dict(zip(tables, row, strict=True)) for row in itertools.islice(columns, max(map(len, tables.values())))]
    others = {"layers": (0, 1), "router_hidden": 4, "predictor_hidden": 3, "gate_scale": 0.7, "gate_shift": 0.2}
    return [RoutingSpec(**row, **others, capacity=CAPACITIES[row["capacity_rule"]]) for row in rows]


def make_spec(routing: RoutingSpec | None, **sizes: Any) -> ModelSpec:
    return ModelSpec(
        vocab_size=40, d_model=16, n_layers=2, n_heads=4, d_head=4, d_ff=24, max_positions=32, routing=routing,
        **{"n_kv_heads": 2, **sizes},
    )  # fmt: skip


def save(model: ir.Model, state: Mapping[str, Tensor], folder: Path) -> Path:
    """Writes the graph next to a weights file, as in a build folder."""
    write_weights(folder / "weights.data", state, "float32")
    bind_weights(model, [WeightsFile.open(folder / "weights.data")], folder)
    path = folder / "graph.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    return path


def export(spec: ModelSpec, bucket: Bucket) -> tuple[ir.Model, torch.nn.Module]:
    module = make_model(spec)
    model = onnx_from_captured(captured_module(module, bucket, "mod"), state_of(module), TOKEN_INPUTS, ["logits"])
    apply_rewrites(model, PORTABLE, "float32")
    return model, module


def runner_of(path: Path) -> OrtRunner:
    return OrtRunner(session_from_onnx(path, path.parent, ["CPUExecutionProvider"], 1, {}), path.name, 1)


SPECS = {
    "untied": make_spec(RoutingSpec(), tie_embeddings=False, n_kv_heads=4),
    **{f"{r.router}-{r.gate}-{r.combine}-{r.capacity_rule}": make_spec(r) for r in variants()},
    "dense": make_spec(None),
    "all-tokens": make_spec(RoutingSpec(capacity=1.0)),
}
FAST = tuple(SPECS)[:2]
"""What `make test` exports; `make test-all` exports every variant."""


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_portable_graph_equals_the_eager_model(spec: ModelSpec, tmp_path: Path) -> None:
    model, module = export(spec, BUCKET)
    k_by_layer = spec.k_by_layer(BUCKET.seq)
    assert_capacity(model, BUCKET, k_by_layer)
    assert (model.ir_version, model.opset_imports) == (IR_VERSION, {"": OPSET})
    assert {node.domain for node in model.graph} == {""}
    assert not model.functions
    # Every bucket has the same names, so that all of them can share one file.
    used = set(state_of(module)) & set(model.graph.initializers)
    assert {name for name in module.state_dict() if ".predictor." not in name} <= used
    path = save(model, state_of(module), tmp_path)
    check_model(str(path))
    runner = runner_of(path)
    ids_BS = np.random.default_rng(3).integers(0, spec.vocab_size, (BUCKET.batch, BUCKET.seq))
    for lengths_B in ([24, 24, 24], [24, 7, 1]):  # Also rows that are shorter than k.
        feeds = {"input_ids": ids_BS, "lengths": np.array(lengths_B)}
        outputs = runner.run({name: feeds[name] for name in runner.inputs})
        with torch.no_grad():
            logits_BSV, selections = observed(module, *map(torch.from_numpy, feeds.values()))
        assert list(outputs) == ["logits", *(f"routed_{layer}" for layer in selections)]
        for row, length in enumerate(lengths_B):
            np.testing.assert_allclose(outputs["logits"][row, :length], logits_BSV[row, :length], atol=2e-5)
        for layer, selected in selections.items():
            np.testing.assert_array_equal(outputs[f"routed_{layer}"], selected.index_BK)
            assert selected.index_BK.shape == (BUCKET.batch, k_by_layer[layer])


def test_equal_scores_are_taken_in_order(exported: tuple[ir.Model, torch.nn.Module], tmp_path: Path) -> None:
    model, module = exported
    runner = runner_of(save(model, state_of(module), tmp_path))
    for lengths_B in ([24, 24, 24], [24, 7, 1]):
        feeds = {"input_ids": np.full((BUCKET.batch, BUCKET.seq), 5), "lengths": np.array(lengths_B)}
        outputs = runner.run(feeds, ["routed_0"])
        # No layer comes before layer 0 and could make these tokens different.
        assert outputs["routed_0"].tolist() == [list(range(6))] * 3


@pytest.fixture(scope="module")
def exported_once() -> tuple[ir.Model, torch.nn.Module]:
    return export(make_spec(ROUTED), BUCKET)


@pytest.fixture
def exported(exported_once: tuple[ir.Model, torch.nn.Module]) -> tuple[ir.Model, torch.nn.Module]:
    model, module = exported_once
    return model.clone(), module


def test_k_is_a_constant_and_single_operators_stay_single(exported: tuple[ir.Model, torch.nn.Module]) -> None:
    model, _ = exported
    kept = [ir.convenience.get_const_tensor(n.inputs[1]) for n in model.graph if n.op_type == "TopK" and n.inputs[1]]
    assert [tensor.numpy().tolist() for tensor in kept if tensor is not None] == [[6]] * 4

    operators = [node.op_type for node in model.graph]
    assert operators.count("Attention") == 2
    assert operators.count("RMSNormalization") == 5
    assert operators.count("TopK") == 4  # The k largest scores, and their positions in ascending order.
    assert not {"If", "Loop", "NonZero", "Compress"} & set(operators)


def test_neither_weights_nor_paths_of_this_machine_are_stored_in_the_graph(
    exported: tuple[ir.Model, torch.nn.Module],
) -> None:
    model, module = exported
    unbound = {name for name, value in model.graph.initializers.items() if value.const_value is None}
    assert unbound == set(state_of(module))
    inline = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    assert sum(tensor.nbytes for tensor in inline) < 2048

    text = onnx.printer.to_text(ir.to_proto(model)) + str(ir.to_proto(model))
    for path in (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]), ".py"):
        assert path not in text
    scopes = {node.metadata_props.get("pkg.torch.onnx.name_scopes", "") for node in model.graph}
    assert any("layers.1" in scope for scope in scopes)
    assert {key for node in model.graph for key in node.metadata_props} == {"pkg.torch.onnx.name_scopes"}


def test_the_export_is_repeatable_and_says_nothing(
    exported: tuple[ir.Model, torch.nn.Module], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    again, _ = export(make_spec(ROUTED), BUCKET)
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.name.startswith(("torch.onnx", "onnx"))] == []
    assert logging.getLogger("onnxscript").level == logging.NOTSET
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(exported[0]).SerializeToString()


def test_the_table_of_translations_is_made_once_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    made: list[int] = []
    original = registration.ONNXRegistry

    class Counted(original):  # type: ignore[misc,name-defined]
        @classmethod
        def from_torchlib(cls, opset_version: int) -> Any:
            made.append(opset_version)
            return original.from_torchlib(opset_version)

    def exported_tanh() -> ir.Model:
        program = captured_module(Does(lambda ids, _: ids.tanh()), Bucket(1, 4), "mod")
        return onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])

    once = exported_tanh()
    monkeypatch.setattr(registration, "ONNXRegistry", Counted)
    descriptor = vars(Counted)["from_torchlib"]
    again = exported_tanh()
    assert made == []
    assert vars(Counted)["from_torchlib"] is descriptor
    assert [node.op_type for node in again.graph] == [node.op_type for node in once.graph]
    monkeypatch.setattr(onnx_export, "_TRANSLATIONS", {})
    exported_tanh()
    assert len(made) == 1


@pytest.mark.fast("nothing", "no translation", "in place")
@pytest.mark.parametrize(
    ("function", "traces"),
    [
        (lambda ids, _: (1 - ids.to(torch.float32).softmax(-1)).reshape(-1, 2) * 2, 0),
        (lambda ids, _: ids.float().square(), 1),  # It has a decomposition and no translation.
        (lambda ids, _: ids.float().movedim(0, 1) * 2, 1),  # It has neither, and only the trace decomposes it.
        (lambda ids, _: ids.float().clone().add_(1), 1),  # It writes into its argument.
        (lambda ids, _: torch.einsum("a,b->ab", ids[0].float(), ids[0].float()), 1),  # Lowering replaced the output.
    ],
    ids=["nothing", "a decomposition", "no translation", "in place", "the output"],
)
def test_a_program_is_traced_again_only_to_decompose_it(
    function: Callable[..., Tensor], traces: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traced: list[object] = []
    original = torch.export.ExportedProgram.run_decompositions

    def counted(program: torch.export.ExportedProgram, *table: Any) -> torch.export.ExportedProgram:
        traced.append(program)
        return original(program, *table)

    program = captured_module(Does(function), Bucket(1, 4), "mod")
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    model = onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])
    assert len(traced) == traces
    assert "run_decompositions" not in vars(program.program)
    ids_BS = np.array([[3, 1, 2, 5]])
    feeds = {"input_ids": ids_BS, "lengths": np.array([4])}
    (logits,) = runner_of(save(model, {}, tmp_path)).run(feeds).values()
    expected = function(torch.from_numpy(ids_BS), None).numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_an_operator_without_a_translation_is_named() -> None:
    with torch.library._scoped_library("mod_export_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("mystery", lambda x: torch.empty_like(x), "Meta")
        program = captured_module(Does(lambda ids, _: torch.ops.mod_export_test.mystery(ids)), Bucket(1, 4), "mod")
        message = r"^mod_export_test\.mystery has no ONNX form in torch\.onnx, at .*small_graphs\.py:\d+\n"
        with pytest.raises(GraphError, match=message):
            onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])


def test_an_overload_without_a_translation_is_named() -> None:
    """The error names this overload, not an earlier overload of the same operator."""

    def bits(ids_BS: Tensor, _lengths_B: Tensor) -> Tensor:
        return ids_BS.float().view(-1).view(torch.int32)

    program = captured_module(Does(bits), Bucket(1, 4), "mod")
    with pytest.raises(GraphError, match=r"^aten\.view\.dtype has no ONNX form in torch\.onnx, at .*:\d+\n"):
        onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])


def test_an_operator_of_another_domain_is_refused() -> None:
    def foreign(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        return torch.onnx.ops.symbolic("com.vendor::Fast", (ids_BS,), dtype=ids_BS.dtype, shape=ids_BS.shape, version=1)

    program = captured_module(Does(foreign), Bucket(1, 4), "mod")
    with pytest.raises(GraphError, match=r"holds operators of com\.vendor; only standard ONNX is allowed"):
        onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])


def test_the_whole_sort_keeps_its_ties_in_order(tmp_path: Path) -> None:
    def by_value(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        down = torch.sort(ids_BS, dim=1, descending=True, stable=True).indices
        up = torch.sort(ids_BS, dim=0, descending=False, stable=True).indices
        return torch.stack([down, up])

    program = captured_module(Does(by_value), Bucket(3, 5), "mod")
    model = onnx_from_captured(program, {}, TOKEN_INPUTS, ["logits"])
    ids_BS = torch.tensor([[1, 2, 1, 2, 1], [0, 0, 0, 0, 0], [1, 2, 1, 2, 3]])
    outputs = runner_of(save(model, {}, tmp_path)).run({"input_ids": ids_BS.numpy(), "lengths": np.ones(3, np.int64)})
    np.testing.assert_array_equal(outputs["logits"], by_value(ids_BS, ids_BS).numpy())


def routed(shape: str) -> ir.Model:
    text = f"g (int64[2, 8] input_ids) => (int64{shape} routed_1, int64[2, 8] logits) {{ routed_1, logits = F() }}"
    return parsed(text)


def shapeless() -> ir.Model:
    model = routed("[2, 4]")
    model.graph.outputs[0].shape = None
    return model


@pytest.mark.parametrize(
    ("model", "k_by_layer", "words"),
    [
        (routed("[2, 3]"), {1: 4}, "layer 1: the graph routes [2,3], expected [2, 4] at b2s8"),
        (routed("[4]"), {1: 4}, "layer 1: the graph routes [4], expected [2, 4] at b2s8"),
        (routed("[2, 4]"), {1: 4, 3: 4}, "layer 3: the graph has no output routed_3 of known shape"),
        (shapeless(), {1: 4}, "layer 1: the graph has no output routed_1 of known shape"),
        (routed("[2, 4]"), {1: 0}, "the graph's outputs are ['logits', 'routed_1'], expected ['logits']"),
    ],
)
def test_a_graph_that_does_not_route_as_declared(model: ir.Model, k_by_layer: dict[int, int], words: str) -> None:
    with pytest.raises(GraphError) as caught:
        assert_capacity(model, Bucket(2, 8), k_by_layer)
    assert str(caught.value) == words


def test_an_unsound_graph_is_refused(exported: tuple[ir.Model, torch.nn.Module], tmp_path: Path) -> None:
    model, module = exported
    without_weights = save(model, state_of(module), tmp_path)
    (tmp_path / "weights.data").unlink()
    with pytest.raises(GraphError, match=r"weights\.data"):
        check_model(str(without_weights))
    wrong = parsed("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    wrong.graph.outputs[0].dtype = ir.DataType.INT64
    path = tmp_path / "wrong.onnx"
    for content in (ir.to_proto(wrong).SerializeToString(), b"not a graph"):
        path.write_bytes(content)
        with pytest.raises(GraphError, match=r"wrong\.onnx: "):
            check_model(str(path))


def test_any_model_keeps_the_names_that_it_is_given() -> None:
    """Weights keep their names, in branches too, and have no value."""
    module = TwoWays()
    program = captured(module, (torch.ones(2, 2), torch.tensor([True, False])), "two ways")
    model = onnx_from_captured(program, state_of(module), ["values", "flags"], ["product", "count"])
    assert [value.name for value in model.graph.inputs] == ["values", "flags"]
    assert [value.name for value in model.graph.outputs] == ["product", "count"]
    assert "weight" in model.graph.initializers
    (branching,) = [node for node in model.graph if node.op_type == "If"]
    used = {value.name for node in model.graph.all_nodes() for value in node.inputs if value is not None}
    assert "weight" in used
    assert "weight" not in branching.attributes["then_branch"].as_graph().initializers
