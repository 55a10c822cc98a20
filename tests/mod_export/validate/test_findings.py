"""Everything that is found out about one candidate, by the functions that a build and `mod-export validate` call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from graph_folders import write_graph
from small_graphs import make_model, make_spec

from mod_export.config import BuildConfig
from mod_export.errors import EngineError
from mod_export.export.nodes import NodeWriter, module_of
from mod_export.export.passes import PORTABLE
from mod_export.types import Bucket
from mod_export.validate.candidates import Candidate
from mod_export.validate.findings import batches_of, causality_of, parity_of
from mod_export.validate.reference import Reference
from mod_models.architecture import LoadedTransformer
from mod_models.checkpoint import Checkpoint

ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"


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


def test_a_sound_engine(folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig) -> None:
    row = parity_of(folder, candidate, reference, config)
    assert row.passed, row.reasons
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", "b2s16", "float32", "mod")
    assert (row.artifact, row.ties_exact, row.located) == (ENGINE, True, None)
    assert row.inputs == ("near_ties", "padded", "random", "text", "ties")


def test_a_dense_engine_has_no_ties(
    tmp_path: Path, reference: Reference, candidate: Candidate, config: BuildConfig
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
    row = parity_of(tmp_path, one, Reference(loaded), config)
    assert row.passed, row.reasons
    assert (row.ties_exact, row.routing.layers) == (None, ())


def test_a_layer_that_routes_nothing_in_this_bucket(tmp_path: Path, candidate: Candidate, config: BuildConfig) -> None:
    """Its weights are in the file and in no graph, so that nobody can replace them there."""
    spec = make_spec(layers=(0, 1), capacity=(0.01, 0.25), capacity_rule="floor")
    assert spec.k_by_layer(16) == {0: 0, 1: 4}
    loaded = LoadedTransformer(Checkpoint(spec=spec, weights=make_model(spec).state_dict()))
    job = write_graph(tmp_path, spec, Bucket(2, 16), PORTABLE, "float32")
    one = replace(candidate, path=job.graph.path, weights=job.weights, graph=None, engine=None)
    row = parity_of(tmp_path, one, Reference(loaded), config)
    assert row.passed, row.reasons
    assert row.ties_exact is True


def change_engine(folder: Path, layer: int, op_type: str, factor: float) -> None:
    model = ir.load(folder / ENGINE)
    node = [node for node in model.graph if node.op_type == op_type and module_of(node) == f"layers.{layer}"][-1]
    value = node.inputs[0]
    assert value is not None
    writer = NodeWriter(model.graph, node, "fault")
    node.replace_input_with(0, writer.op("Mul", value, np.array(factor, np.float32)))
    (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())


def test_an_engine_that_fails_is_told_where(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    change_engine(folder, 1, "MatMul", 1.01)
    row = parity_of(folder, candidate, reference, config)
    assert not row.passed
    assert row.located is not None
    assert row.located.layer == "layers.1"
    assert row.located.operator.startswith("MatMul ")
    assert row.reasons[-1].startswith("differs first in layers.1, MatMul ")
    assert any("logits: max abs error " in reason for reason in row.reasons)


def test_without_a_view_inside_it_is_told_by_depth(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    change_engine(folder, 1, "MatMul", 1.5)
    row = parity_of(folder, replace(candidate, graph=None), reference, config)
    assert row.located is not None
    assert (row.located.layer, row.located.operator) == ("layers.1", None)
    assert row.reasons[-1] == "differs first in layers.1"


def test_ties_that_go_to_the_later_token(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    """So little that only exactly equal scores are decided by it: no other input tells."""
    model = ir.load(folder / ENGINE)
    take = next(node for node in model.graph if node.op_type == "TopK" and node.attributes.get_int("largest", 1))
    writer = NodeWriter(model.graph, take, "fault")
    rising = np.arange(16, dtype=np.float32)[None] * np.float32(1e-12)
    scores = writer.op("Add", take.inputs[0], rising)
    take.replace_input_with(0, scores)
    (folder / ENGINE).write_bytes(ir.to_proto(model).SerializeToString())
    row = parity_of(folder, candidate, reference, config)
    assert row.ties_exact is False
    assert not row.passed
    reason = "random: layer 0 routing: 8 slots do not go to the earlier of tokens with equal scores"
    assert reason in row.reasons
    assert all("logits" not in reason for reason in row.reasons)


@pytest.mark.parametrize("data", [None, b"", b"not a graph at all"])
def test_what_cannot_be_run_has_failed(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, data: bytes | None
) -> None:
    (folder / ENGINE).unlink() if data is None else (folder / ENGINE).write_bytes(data)
    row = parity_of(folder, candidate, reference, config)
    assert not row.passed
    refused, unplaced = row.reasons
    assert refused.startswith("cannot be run: mod-b2s16-float32.onnx: ONNX Runtime refuses this graph: ")
    assert unplaced.startswith("the place of the fault was not found: ")
    assert "not a readable ONNX graph" in unplaced
    assert (row.inputs, row.located) == ((), None)


def test_an_engine_without_its_weights(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    (folder / "graphs/weights-float32.data").unlink()
    row = parity_of(folder, candidate, reference, config)
    assert [reason.partition(": ")[0] for reason in row.reasons] == [
        "cannot be run", "the place of the fault was not found"
    ]  # fmt: skip
    assert "expected a regular file of weights" in row.reasons[1]


def test_an_engine_of_a_target_that_is_not_here(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig
) -> None:
    assert candidate.engine is not None
    engine = replace(candidate.engine, target="tensorrt", path="engines/tensorrt/e.engine", weights=None)
    plan = replace(
        candidate,
        setting=replace(candidate.setting, target="tensorrt"),
        path=engine.path,
        weights=None,
        graph=None,
        engine=engine,
    )
    row = parity_of(folder, plan, reference, config)
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
