"""All findings about one candidate, by the functions that a build and `mod-export validate` call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_folders import write_graph
from observing import observed
from small_graphs import make_model, make_spec
from tiny_models import lively_checkpoint
from tiny_models import make_spec as routed_spec

from benchmarks.faults.fault_table import f32
from benchmarks.faults.graph_surgery import plant
from mod_export.config import BuildConfig
from mod_export.errors import ConfigError, EngineError
from mod_export.graph.rewrites import PORTABLE
from mod_export.judge.candidates import Candidate
from mod_export.judge.causality import causality_of
from mod_export.judge.compare import Judged
from mod_export.judge.inputs import Batch, batches_of
from mod_export.judge.parity import parity_of, ties_of_runs, zeroed_routers
from mod_export.judge.reference import Reference, routing_map
from mod_export.model.model import Model
from mod_export.model.transformer import TransformerModel
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Graph
from mod_models.checkpoint import Checkpoint
from mod_models.spec import ExpertsSpec, ModelSpec

ENGINE = "engines/ort-cpu/mod-b2s16-float32.onnx"
Parity = Callable[..., ParityRow]


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
    assert all(np.array_equal(first.ids_BS, second.ids_BS) for first, second in zip(batches, again, strict=True))
    # The search for rows with near-ties costs many runs of the reference, so it runs once.
    assert batches[-1] is again[-1]
    assert batches_of(reference, Bucket(1, 16), config)[-1] is not batches[-1]


@pytest.fixture
def judged(
    folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig, fresh: Callable[[Graph], bytes]
) -> Parity:
    """Parity of a candidate in a folder; the default is the correct engine."""
    return lambda other=candidate, by=reference, root=folder: parity_of(root, other, by, config, fresh)


def test_a_sound_engine(judged: Parity) -> None:
    row = judged()
    assert row.passed, row.reasons
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", "b2s16", "float32", "mod")
    assert (row.artifact, row.ties_exact, row.located) == (ENGINE, True, None)
    assert row.inputs == ("near_ties", "padded", "random", "text", "ties")


@pytest.mark.parametrize(
    ("spec", "kind", "ties"),
    [
        (replace(make_spec(), routing=None), "dense", None),
        # Layer 0 routes nothing in this bucket: its router is in the weights file but in no graph, so it cannot change.
        (make_spec(layers=(0, 1), capacity=(0.01, 0.25), capacity_rule="floor"), "mod", True),
    ],
    ids=["dense", "a layer that routes nothing"],
)
def test_ties_where_routers_are_missing(
    tmp_path: Path, judged: Parity, candidate: Candidate, spec: ModelSpec, kind: str, ties: bool | None
) -> None:
    loaded = TransformerModel(Checkpoint(spec=spec, weights=make_model(spec).state_dict()))
    job = write_graph(tmp_path, spec, Bucket(2, 16), PORTABLE, "float32")
    setting = replace(candidate.setting, model=kind)
    changed = replace(
        candidate, setting=setting, path=job.graph.path, weights="graphs/weights-float32.data", graph=None, engine=None
    )
    row = judged(changed, Reference(loaded), tmp_path)
    assert row.passed, row.reasons
    assert row.ties_exact is ties
    assert [layer.layer for layer in row.routing.layers] == ([1] if ties else [])


def change_product(folder: Path, factor: float) -> None:
    plant(folder / ENGINE, lambda s: s.feed(s.node(1, "MatMul", -1), 0, "Mul", f32(factor)))


def test_an_engine_that_fails_is_told_where(folder: Path, judged: Parity, candidate: Candidate) -> None:
    change_product(folder, 1.5)
    row = judged()
    assert not row.passed
    assert row.located.layer == "layers.1"
    assert row.located.operator.startswith("MatMul ")
    assert row.reasons[-1].startswith("differs first in layers.1, MatMul ")
    assert any("logits: max abs error " in reason for reason in row.reasons)
    # Without the values inside the graph, the place is found by depth.
    row = judged(replace(candidate, graph=None))
    assert (row.located.layer, row.located.operator) == ("layers.1", None)
    assert row.reasons[-1] == "differs first in layers.1"


def test_ties_that_go_to_the_later_token(folder: Path, judged: Parity) -> None:
    """The change is so small that it decides only between exactly equal scores; no other input shows it."""
    plant(folder / ENGINE, lambda s: s.feed(s.take(0), 0, "Add", f32(*np.arange(16) * 1e-12)))
    row = judged()
    assert row.ties_exact is False
    assert not row.passed
    assert "random: layer 0 routing: 8 slots do not go to the earlier of tokens with equal scores" in row.reasons
    assert all("logits" not in reason for reason in row.reasons)


@pytest.mark.parametrize(
    ("file", "data", "refused", "unplaced"),
    [
        *(
            (ENGINE, data, "mod-b2s16-float32.onnx: ONNX Runtime refuses this graph: ", "not a readable ONNX graph")
            for data in (None, b"", b"not a graph at all")
        ),
        ("graphs/weights-float32.data", None, "", ""),
    ],
)
def test_what_cannot_be_run_has_failed(
    folder: Path, judged: Parity, file: str, data: bytes | None, refused: str, unplaced: str
) -> None:
    (folder / file).unlink() if data is None else (folder / file).write_bytes(data)
    row = judged()
    assert (row.passed, row.inputs, row.located) == (False, (), None)
    first, second = row.reasons
    assert first.startswith(f"cannot be run: {refused}")
    assert second.startswith("the place of the fault was not found: ")
    assert unplaced in second


def test_an_engine_of_a_target_that_is_not_here(judged: Parity, candidate: Candidate) -> None:
    engine = replace(candidate.engine, target="tensorrt", path="engines/tensorrt/e.engine", weights=None)
    row = judged(Candidate(setting=engine.setting, path=engine.path, weights=None, graph=None, engine=engine))
    assert not row.passed
    assert row.reasons[0].startswith("cannot be run: tensorrt: cannot run engines/tensorrt/e.engine here: ")


def test_causality(folder: Path, candidate: Candidate, reference: Reference, config: BuildConfig) -> None:
    row, blind = (causality_of(folder, candidate, reference, config, tolerance) for tolerance in (1e-4, 1e9))
    assert (row.target, row.bucket, row.dtype, row.model) == ("ort-cpu", "b2s16", "float32", "mod")
    assert row.suffixes == config.parity.suffixes == 4
    assert (row.causal, blind.causal) == (False, True)
    assert blind.largest_change == row.largest_change > 1e-3
    (folder / ENGINE).write_bytes(b"")
    with pytest.raises(EngineError, match="ONNX Runtime refuses this graph"):
        causality_of(folder, candidate, reference, config, 1e-4)


@pytest.mark.parametrize("router", ["linear", "linear_bias", "mlp", "norm_mlp"])
def test_a_router_of_zeros_scores_all_tokens_alike(router: str) -> None:
    spec = routed_spec(router=router)
    loaded = TransformerModel(lively_checkpoint(spec))
    zeros = next(zeroed_routers(loaded, 16))
    assert {name: array.shape for name, array in zeros.items()} == {
        name: tuple(loaded.weights[name].shape) for name in loaded.weights if ".router." in name
    }
    weights = {name: tensor * (name not in zeros) for name, tensor in loaded.weights.items()}
    silenced = TransformerModel(Checkpoint(spec=spec, weights=weights))
    ids_BS = torch.arange(16)[None].expand(2, -1)
    _, decided = observed(silenced.module(), ids_BS, torch.tensor([16, 9]))
    for routing in decided.values():
        assert routing.score_BS.unique().numel() == 1


EXPERTS = ExpertsSpec(n_experts=2, layers=(0, 2))


@pytest.mark.parametrize(
    ("spec", "seq", "routers"),
    [
        (routed_spec(routing=None), 16, []),
        # A router that selects no token is left alone.
        (routed_spec(capacity=(0.05, 0.5)), 16, [["2.router"]]),
        (routed_spec(capacity=(0.05, 0.5)), 1, []),
        # Experts of a layer that selects no token still run where only attention is routed.
        (
            routed_spec(capacity=(0.05, 0.5), parts="attention", experts=EXPERTS),
            16,
            [["0.experts.router", "2.experts.router", "2.router"], ["0.experts.router", "2.experts.router"]],
        ),
        # Experts behind a router are also zeroed separately.
        (
            routed_spec(capacity=0.5, experts=EXPERTS),
            16,
            [
                ["0.experts.router", "0.router", "2.experts.router", "2.router"],
                ["0.experts.router", "2.experts.router"],
            ],
        ),
        (routed_spec(routing=None, experts=EXPERTS), 16, [["0.experts.router", "2.experts.router"]]),
    ],
)
def test_which_routers_are_silenced(spec: ModelSpec, seq: int, routers: list[list[str]]) -> None:
    zeroed = zeroed_routers(TransformerModel(lively_checkpoint(spec)), seq)
    expected = [[f"layers.{name}.projection.weight" for name in names] for names in routers]
    assert [sorted(zeros) for zeros in zeroed] == expected


@pytest.mark.parametrize(
    ("rule", "routed", "wrong"),
    [
        # The second row has two real tokens; its third slot may hold any padding.
        ("rank", [[0, 1, 2], [0, 1, 5]], 0),
        ("rank", [[0, 1, 3], [0, 1, 2]], 1),
        ("rank", [[3, 4, 5], [0, 1, 2]], 3),
        ("rank", [[0, 1, 2], [0, 2, 3]], 1),
        # Where tokens choose by themselves, no score is above zero.
        ("first_come", [[-1, -1, -1], [-1, -1, -1]], 0),
        ("first_come", [[0, -1, -1], [-1, -1, -1]], 1),
    ],
)
def test_slots_that_go_to_other_tokens_are_counted(rule: str, routed: list[list[int]], wrong: int) -> None:
    """They are reported once, even if several inputs show them."""
    batch = Batch.of_tokens("padded", np.zeros((2, 6), np.int64), np.array([6, 2]))
    judged = {"1.expert0": Judged(rule, np.zeros((2, 6), np.float32), batch.real_BS)}
    runs = [{"logits": np.ones(3), "routed_1.expert0": np.array(routed)}] * 2
    message = f"padded: layer 1.expert0 routing: {wrong} slots do not go to the earlier of tokens with equal scores"
    assert ties_of_runs(runs, [batch] * 2, [judged] * 2) == ([message] if wrong else [])


class Bare(Model):
    """A model with only what export needs, like a module of a user."""

    spec = weights = tokens = module = skeleton = None

    def __init__(self, loaded: TransformerModel) -> None:
        self.spec, self.weights, self.tokens = loaded.spec, loaded.weights, loaded.tokens
        self.module, self.skeleton = loaded.module, loaded.skeleton


@pytest.mark.slow
def test_a_model_without_text_and_declarations_is_judged_too(
    folder: Path, judged: Parity, candidate: Candidate, loaded: TransformerModel, config: BuildConfig
) -> None:
    bare = Reference(Bare(loaded))
    row = judged(by=bare)
    assert row.passed, row.reasons
    assert row.inputs == ("near_ties", "padded", "random", "ties")
    assert row.routing.routed == row.routing.agreed > 0
    assert (row.text, row.ties_exact) == (None, None)
    causality = causality_of(folder, candidate, bare, config, 1e-4)
    assert (causality.causal, causality.declared) == (False, False)
    drawn = routing_map(bare, candidate.setting.bucket, batches_of(bare, candidate.setting.bucket, config))
    assert drawn.tokens[0].isdecimal()
    change_product(folder, 1.01)
    assert judged(by=bare).located.layer == "layers.1"


def test_hidden_states_of_a_model_without_a_head_cannot_be_judged(loaded: TransformerModel) -> None:
    with pytest.raises(ConfigError, match="outputs: none, but this model has no head") as caught:
        Reference(Bare(loaded), "none")
    assert "build it with logits" in str(caught.value)
