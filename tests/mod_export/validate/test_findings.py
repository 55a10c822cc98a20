"""Everything that is found out about one candidate, by the functions that a build and `mod-export validate` call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graph_folders import write_graph
from observing import observed
from small_graphs import make_model, make_spec
from tiny_models import lively_checkpoint
from tiny_models import make_spec as routed_spec

from mod_export.config import BuildConfig
from mod_export.errors import ConfigError, EngineError
from mod_export.export.nodes import NodeWriter, module_of
from mod_export.export.passes import PORTABLE
from mod_export.types import Bucket, Graph, Site
from mod_export.validate.candidates import Candidate
from mod_export.validate.causality import causality_of
from mod_export.validate.compare import Judged
from mod_export.validate.findings import parity_of, ties_of_runs, zeroed_routers
from mod_export.validate.inputs import Batch, batches_of
from mod_export.validate.reference import Reference, routing_map
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ExpertsSpec

ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
Fresh = Callable[[Graph], bytes]
BATCH = Batch("padded", np.zeros((2, 6), np.int64), np.array([6, 2]))
EQUAL: dict[Site, Judged] = {7: Judged("rank", np.zeros((2, 6), np.float32), BATCH.real_BS)}


def test_inputs_are_of_every_kind_and_the_same_for_all(
    reference: Reference, bucket: Bucket, config: BuildConfig
) -> None:
    batches = batches_of(reference, bucket, config)
    kinds = [batch.kind for batch in batches]
    assert kinds.count("text") == config.parity.text_batches == 4
    assert {kind: kinds.count(kind) for kind in ("random", "padded", "ties", "near_ties")} == {
        "random": 8, "padded": 4, "ties": 1, "near_ties": 4
    }  # fmt: skip
    again = batches_of(reference, bucket, config)
    assert all(np.array_equal(one.ids_BS, other.ids_BS) for one, other in zip(batches, again, strict=True))
    # Rows with near-ties cost many runs of the reference, so they are looked for once.
    assert batches[-1] is again[-1]
    assert batches_of(reference, Bucket(1, 16), config)[-1] is not batches[-1]


def test_a_sound_engine(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    row = parity_of(folder, candidate, reference, config, fresh)
    assert row.passed, row.reasons
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", "b2s16", "float32", "mod")
    assert (row.artifact, row.ties_exact, row.located) == (ENGINE, True, None)
    assert row.inputs == ("near_ties", "padded", "random", "text", "ties")


def test_a_dense_engine_has_no_ties(
    tmp_path: Path, reference: Reference, candidate: Candidate, config: BuildConfig, fresh: Fresh
) -> None:
    twin = replace(make_spec(), routing=None)
    job = write_graph(tmp_path, twin, Bucket(2, 16), PORTABLE, "float32")
    loaded = LoadedTransformer(Checkpoint(spec=twin, weights=make_model(twin).state_dict()))
    one = replace(
        candidate,
        setting=replace(candidate.setting, model="dense"),
        path=job.graph.path,
        weights=job.weights,
        graph=None,
        engine=None,
    )
    row = parity_of(tmp_path, one, Reference(loaded), config, fresh)
    assert row.passed, row.reasons
    assert (row.ties_exact, row.routing.layers) == (None, ())


def test_a_layer_that_routes_nothing_in_this_bucket(
    tmp_path: Path, candidate: Candidate, config: BuildConfig, fresh: Fresh
) -> None:
    """Its weights are in the file and in no graph, so that nobody can replace them there."""
    spec = make_spec(layers=(0, 1), capacity=(0.01, 0.25), capacity_rule="floor")
    assert spec.k_by_layer(16) == {0: 0, 1: 4}
    loaded = LoadedTransformer(Checkpoint(spec=spec, weights=make_model(spec).state_dict()))
    job = write_graph(tmp_path, spec, Bucket(2, 16), PORTABLE, "float32")
    one = replace(candidate, path=job.graph.path, weights=job.weights, graph=None, engine=None)
    row = parity_of(tmp_path, one, Reference(loaded), config, fresh)
    assert row.passed, row.reasons
    assert row.ties_exact is True


def change_engine(folder: Path, layer: int, op_type: str, factor: float) -> None:
    model = ir.load(folder / ENGINE)
    node = [node for node in model.graph if node.op_type == op_type and module_of(node) == f"layers.{layer}"][-1]
    value = node.inputs[0]
    writer = NodeWriter(model.graph, node, "fault")
    node.replace_input_with(0, writer.op("Mul", value, np.array(factor, np.float32)))
    (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())


def test_an_engine_that_fails_is_told_where(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    change_engine(folder, 1, "MatMul", 1.01)
    row = parity_of(folder, candidate, reference, config, fresh)
    assert not row.passed
    assert row.located.layer == "layers.1"
    assert row.located.operator.startswith("MatMul ")
    assert row.reasons[-1].startswith("differs first in layers.1, MatMul ")
    assert any("logits: max abs error " in reason for reason in row.reasons)


def test_without_a_view_inside_it_is_told_by_depth(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    change_engine(folder, 1, "MatMul", 1.5)
    row = parity_of(folder, replace(candidate, graph=None), reference, config, fresh)
    assert (row.located.layer, row.located.operator) == ("layers.1", None)
    assert row.reasons[-1] == "differs first in layers.1"


def test_ties_that_go_to_the_later_token(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    """So little that only exactly equal scores are decided by it: no other input tells."""
    model = ir.load(folder / ENGINE)
    take = next(node for node in model.graph if node.op_type == "TopK" and node.attributes.get_int("largest", 1))
    writer = NodeWriter(model.graph, take, "fault")
    rising = np.arange(16, dtype=np.float32)[None] * np.float32(1e-12)
    scores = writer.op("Add", take.inputs[0], rising)
    take.replace_input_with(0, scores)
    (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
    row = parity_of(folder, candidate, reference, config, fresh)
    assert row.ties_exact is False
    assert not row.passed
    reason = "random: layer 0 routing: 8 slots do not go to the earlier of tokens with equal scores"
    assert reason in row.reasons
    assert all("logits" not in reason for reason in row.reasons)


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all"])
def test_what_cannot_be_run_has_failed(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, data: bytes | None, fresh: Fresh
) -> None:
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    row = parity_of(folder, candidate, reference, config, fresh)
    assert not row.passed
    refused, unplaced = row.reasons
    assert refused.startswith("cannot be run: mod-b2s16-float32.onnx: ONNX Runtime refuses this graph: ")
    assert unplaced.startswith("the place of the fault was not found: ")
    assert "not a readable ONNX graph" in unplaced
    assert (row.inputs, row.located) == ((), None)


def test_an_engine_without_its_weights(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    (folder / "graphs/weights-float32.data").unlink()
    row = parity_of(folder, candidate, reference, config, fresh)
    assert [reason.partition(": ")[0] for reason in row.reasons] == [
        "cannot be run", "the place of the fault was not found"
    ]  # fmt: skip


def test_an_engine_of_a_target_that_is_not_here(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Fresh
) -> None:
    engine = replace(candidate.engine, target="tensorrt", path="engines/tensorrt/e.engine", weights=None)
    plan = replace(
        candidate,
        setting=replace(candidate.setting, target="tensorrt"),
        path=engine.path,
        weights=None,
        graph=None,
        engine=engine,
    )
    row = parity_of(folder, plan, reference, config, fresh)
    assert not row.passed
    assert row.reasons[0].startswith("cannot be run: tensorrt: cannot run engines/tensorrt/e.engine here: ")


def test_causality(folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig) -> None:
    row = causality_of(folder, candidate, reference, config, 1e-4)
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", "b2s16", "float32", "mod")
    assert row.suffixes == config.parity.suffixes == 4
    assert not row.causal


def test_causality_holds_changes_against_the_tolerance(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    blind = causality_of(folder, candidate, reference, config, tolerance=1e9)
    assert blind.causal
    assert blind.largest_change == causality_of(folder, candidate, reference, config, 1e-4).largest_change > 1e-3


def test_causality_of_what_cannot_be_run(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    (folder / ENGINE).write_bytes(b"")
    with pytest.raises(EngineError, match="ONNX Runtime refuses this graph"):
        causality_of(folder, candidate, reference, config, 1e-4)


def all_zeroed(loaded: LoadedTransformer) -> dict[str, np.ndarray]:
    return next(zeroed_routers(loaded, 16))


@pytest.mark.parametrize("router", ["linear", "linear_bias", "mlp"])
def test_a_router_of_zeros_scores_all_tokens_alike(router: str) -> None:
    spec = routed_spec(router=router)
    loaded = LoadedTransformer(lively_checkpoint(spec))
    zeros = all_zeroed(loaded)
    assert zeros
    assert all(name in loaded.weights for name in zeros)
    assert {tuple(array.shape) for array in zeros.values()} == {tuple(loaded.weights[name].shape) for name in zeros}
    weights = {name: tensor * (name not in zeros) for name, tensor in loaded.weights.items()}
    silenced = LoadedTransformer(Checkpoint(spec=spec, weights=weights))
    ids_BS = torch.arange(16)[None].expand(2, -1)
    _, decided = observed(silenced.module(), ids_BS, torch.tensor([16, 9]))
    for routing in decided.values():
        assert routing.score_BS.unique().numel() == 1


def test_a_dense_model_has_no_router() -> None:
    assert list(zeroed_routers(LoadedTransformer(lively_checkpoint(routed_spec())).dense(), 16)) == []


def test_a_router_that_takes_no_token_is_left_alone() -> None:
    loaded = LoadedTransformer(lively_checkpoint(routed_spec(capacity=(0.05, 0.5))))
    assert loaded.k_by_layer(16) == {0: 0, 2: 8}
    assert list(all_zeroed(loaded)) == ["layers.2.router.projection.weight"]
    assert list(zeroed_routers(loaded, 1)) == []
    # Experts of a layer whose blocks take nobody are asked all the same where attention alone is routed.
    experts = ExpertsSpec(n_experts=2, layers=(0, 2))
    spec = routed_spec(capacity=(0.05, 0.5), parts="attention", experts=experts)
    assert list(all_zeroed(LoadedTransformer(lively_checkpoint(spec)))) == [
        "layers.0.experts.router.projection.weight",
        "layers.2.experts.router.projection.weight",
        "layers.2.router.projection.weight",
    ]


def test_experts_behind_a_router_are_asked_by_themselves_too() -> None:
    spec = routed_spec(capacity=0.5, experts=ExpertsSpec(n_experts=2, layers=(0, 2)))
    loaded = LoadedTransformer(lively_checkpoint(spec))
    zeros, experts = zeroed_routers(loaded, 16)
    assert len(zeros) == 4
    assert set(experts) == {f"layers.{i}.experts.router.projection.weight" for i in (0, 2)}
    assert len(list(zeroed_routers(loaded.dense(), 16))) == 1


def test_the_first_real_tokens_of_each_row() -> None:
    # The second row has two real tokens; what stands in its third slot is padding, whichever.
    assert ties_of_runs([{"logits": np.ones(3), "routed_7": np.array([[0, 1, 2], [0, 1, 5]])}], [BATCH], [EQUAL]) == []


@pytest.mark.parametrize(
    ("routed", "wrong"), [([[0, 1, 3], [0, 1, 2]], 1), ([[3, 4, 5], [0, 1, 2]], 3), ([[0, 1, 2], [0, 2, 3]], 1)]
)
def test_places_that_go_to_somebody_else_are_counted(routed: list[list[int]], wrong: int) -> None:
    assert ties_of_runs([{"routed_7": np.array(routed)}], [BATCH], [EQUAL]) == [
        f"padded: layer 7 routing: {wrong} slots do not go to the earlier of tokens with equal scores"
    ]


def test_the_same_is_said_once() -> None:
    found = {"routed_7": np.array([[1, 2, 3], [0, 1, 2]])}
    assert len(ties_of_runs([found, found], [BATCH, BATCH], [EQUAL, EQUAL])) == 1


def test_where_tokens_choose_nobody_above_zero_is_nobody() -> None:
    judged: dict[Site, Judged] = {"1.expert0": Judged("first_come", np.zeros((2, 6), np.float32), BATCH.real_BS)}
    nobody = {"routed_1.expert0": np.full((2, 3), -1)}
    assert ties_of_runs([nobody], [BATCH], [judged]) == []
    somebody = {"routed_1.expert0": np.array([[0, -1, -1], [-1, -1, -1]])}
    assert ties_of_runs([somebody], [BATCH], [judged]) == [
        "padded: layer 1.expert0 routing: 1 slots do not go to the earlier of tokens with equal scores"
    ]


class Bare:
    """A model with what export needs and nothing else, as a module of a user's own."""

    def __init__(self, loaded: LoadedTransformer) -> None:
        self.spec, self.weights = loaded.spec, loaded.weights
        self.vocab_size, self.max_positions = loaded.vocab_size, loaded.max_positions
        self.module, self.skeleton = loaded.module, loaded.skeleton


def test_a_model_without_text_and_declarations_is_judged_too(
    folder: Path, candidate: Candidate, loaded: LoadedTransformer, config: BuildConfig, fresh: Fresh
) -> None:
    bare = Reference(Bare(loaded))
    row = parity_of(folder, candidate, bare, config, fresh)
    assert row.passed, row.reasons
    assert row.inputs == ("near_ties", "padded", "random", "ties")
    assert row.routing.routed == row.routing.agreed > 0
    assert (row.text, row.ties_exact) == (None, None)
    causality = causality_of(folder, candidate, bare, config, 1e-4)
    assert (causality.causal, causality.declared) == (False, False)
    drawn = routing_map(bare, candidate.setting.bucket, batches_of(bare, candidate.setting.bucket, config))
    assert drawn.tokens[0].isdecimal()
    change_engine(folder, 1, "MatMul", 1.01)
    found = parity_of(folder, candidate, bare, config, fresh)
    assert found.located.layer == "layers.1"


def test_hidden_states_of_a_model_without_a_head_cannot_be_judged(loaded: LoadedTransformer) -> None:
    with pytest.raises(ConfigError, match="outputs: none, but this model has no head") as caught:
        Reference(Bare(loaded), "none")
    assert "build it with logits" in str(caught.value)
