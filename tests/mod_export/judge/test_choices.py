"""Models with discrete choices that are no routing sites: correct graphs pass, and faulty graphs do not.

Rows that rounding decides are left out and reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import choice_models
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from choice_models import CHOOSERS, SHAPE, Argmax, Bucketize, Chooser, Codebook, D, MaxOfRow, chooser, ids_of
from command_line import FEW_SAMPLES
from small_graphs import session
from torch import Tensor, fx, nn

from mod_export.api import build
from mod_export.config import config_from_toml
from mod_export.engines.ort_session import OrtRunner
from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.weights import state_of
from mod_export.judge.choices import Choice, Holder
from mod_export.judge.compare import Slack
from mod_export.judge.compare_runner import compare_runner
from mod_export.judge.inputs import Batch, batches_of
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.model.module import model_from_module
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Setting

BUCKET = Bucket(*SHAPE)
CONFIG = config_from_toml(None)
SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=BUCKET)


@functools.cache
def reference_of(name: str) -> Reference:
    return Reference(model_from_module(chooser(name), ids_of, [BUCKET], name))


def graph_of(module: nn.Module, outputs: tuple[str, ...]) -> onnx.ModelProto:
    """A real export, with the weights in it."""
    state = state_of(module)
    made = captured(module, (ids_of(*SHAPE),), "test")
    model = onnx_from_captured(made, state, ["ids"], outputs)
    for name, value in model.graph.initializers.items():
        if name in state:
            value.const_value = ir.tensor(state[name].detach().numpy(), name=name)
    return ir.to_proto(model)


def judged(module: nn.Module, reference: Reference, batches: list[Batch] | None = None) -> ParityRow:
    """Judges a module's graph on ONNX Runtime as the candidate of a reference."""
    graph = ir.from_proto(graph_of(module, reference.output_names))
    on = batches or batches_of(reference, BUCKET, CONFIG)
    with OrtRunner(session(graph), "candidate", 1) as runner:
        return judge_runner([(runner, on)], reference, CONFIG.parity.float32, SETTING)


@pytest.mark.fast(
    "argmax",
    "scores that are cut",
    "a top-k that is no site",
    "equal to the largest",
    "round",
    "ids",
    "leaky by hand",
)
@pytest.mark.parametrize("name", CHOOSERS)
def test_a_sound_graph_passes(name: str) -> None:
    row = judged(chooser(name), reference_of(name))
    assert row.reasons == ()
    assert "sample" in row.inputs
    for left in row.left_out:
        assert left.because.startswith("rounding decides what aten.")
        assert "choice_models.py:" in left.because
        assert left.rows < left.total


def one_element(model: Chooser) -> None:
    model.mix.weight[3, 5] *= 1.05


def one_row_of_the_head(model: Chooser) -> None:
    (model.head if not isinstance(model, CHOOSERS["ids"]) else model.router).weight[1] *= 1.01


@pytest.mark.fast(
    "argmax-one_element",
    "round-one_row_of_the_head",
    "a top-k that is no site-one_element",
    "equal to the largest-one_row_of_the_head",
    "ids-one_element",
)
@pytest.mark.parametrize("change", [one_element, one_row_of_the_head])
@pytest.mark.parametrize("name", CHOOSERS)
def test_a_wrong_weight_fails(name: str, change: Callable[[Chooser], object]) -> None:
    row = judged(chooser(name, change), reference_of(name))
    assert any("max abs error" in reason for reason in row.reasons), row.reasons


class WrongArgmax(Argmax):
    """Adds the next expert's vector."""

    def choose(self, x: Tensor) -> Tensor:
        return x + self.table.roll(1, 0)[self.router(x).argmax(-1)]


class WrongMax(MaxOfRow):
    """Adds the token after the best one."""

    def choose(self, x: Tensor) -> Tensor:
        best = (self.score(x)[..., 0].argmax(1) + 1).clamp(max=x.shape[1] - 1)
        return x + torch.gather(x, 1, best[:, None, None].expand(-1, 1, D))


class WrongBuckets(Bucketize):
    """Has a slightly wrong boundary, so a few tokens go to another bucket."""

    def choose(self, x: Tensor) -> Tensor:
        return x + self.table[torch.bucketize(self.score(x)[..., 0], torch.tensor([-0.5, 0.05, 0.5]))]


class WrongDistance(Codebook):
    """Omits the norm of the codes, and so often chooses another code."""

    def choose(self, x: Tensor) -> Tensor:
        return x + self.table[(-2 * x @ self.table.T).argmin(-1)]


@pytest.mark.fast("argmax-WrongArgmax", "max of a row-WrongMax", "bucketize-WrongBuckets")
@pytest.mark.parametrize(
    ("name", "faulty"),
    [("argmax", WrongArgmax), ("max of a row", WrongMax), ("bucketize", WrongBuckets), ("codebook", WrongDistance)],
)
def test_a_wrong_choice_fails(name: str, faulty: type[Chooser]) -> None:
    torch.manual_seed(1)
    row = judged(faulty().eval(), reference_of(name))
    assert any("max abs error" in reason for reason in row.reasons), row.reasons


def test_what_rounding_decides_is_left_out_and_said() -> None:
    """In a row of one repeated token, any six tokens have the six largest scores."""
    row = judged(chooser("a top-k that is no site"), reference_of("a top-k that is no site"))
    (left,) = row.left_out
    assert (left.output, left.inputs, left.rows, row.inputs) == ("logits", ("ties",), 48, ("sample",))
    path = Path(choice_models.__file__)
    lines = path.read_text(encoding="utf-8").splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if ".topk(6, 1)" in text)
    assert left.because == (
        f"rounding decides what aten.topk in model at {path}:{line} gives there, in the reference itself"
    )
    assert str(left) == f"logits: 48 of 240 rows, on ties: {left.because}"
    assert not any("same routing" in reason for reason in row.reasons)


class NearEdge(Chooser):
    """Has an edge that differs from the score of tokens with the id 0 by a factor of 1 + 1e-8, less than rounding."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        score_BS = self.score(x)[..., 0]
        edge = score_BS.gather(1, (ids == 0).int().argmax(1, keepdim=True))
        return self.head(torch.where((score_BS >= edge * (1 + 1e-8))[..., None], x, -x))


def with_zeros(batch: int, seq: int, share: float) -> Batch:
    ids = np.random.default_rng(0).integers(1, 50, (batch, seq))
    ids[:, : int(share * seq)] = 0
    return Batch("sample", BUCKET, {"ids": ids})


def near_edge() -> NearEdge:
    torch.manual_seed(1)
    return NearEdge().eval()


@functools.cache
def reference_near_edge() -> Reference:
    return Reference(model_from_module(near_edge(), ids_of, [BUCKET], "near"))


def test_a_row_near_an_edge_is_left_out_and_the_others_are_judged() -> None:
    reference = reference_near_edge()
    row = judged(near_edge(), reference, [with_zeros(*SHAPE, 0.25)])
    (left,) = row.left_out
    assert (row.passed, left.rows, left.total, row.tokens) == (True, 12, 48, 36)
    assert "aten.ge" in left.because
    faulty = near_edge()
    with torch.no_grad():
        faulty.head.weight[0] *= 1.01
    assert not judged(faulty, reference, [with_zeros(*SHAPE, 0.25)]).passed


def test_a_gate_that_cannot_be_evaluated_fails() -> None:
    row = judged(near_edge(), reference_near_edge(), [with_zeros(*SHAPE, 0.8)])
    (reason,) = row.reasons
    assert reason.startswith("logits: could not be evaluated: rounding decides what aten.ge.Tensor in model at ")
    assert reason.endswith(
        "gives there, in the reference itself, and 10 of 48 rows of it are left, at least 25% must be; give samples on "
        "which the model itself decides clearly"
    )
    # Where the reference jumps, the allowance does not grow: float64 and float32 decide differently there, far beyond
    # rounding, so both get the same decisions.
    assert row.rounding_error < 1e-5


def test_more_may_be_off_in_fewer_bits() -> None:
    """More is left out then, because bfloat16 cannot distinguish what float32 can."""
    reference, counts = reference_of("argmax"), []
    graph = ir.from_proto(graph_of(chooser("argmax"), reference.output_names))
    batches = batches_of(reference, BUCKET, CONFIG)[:1]
    with OrtRunner(session(graph), "candidate", 1) as runner:
        for units in (16.0, 2.0**16):
            slack = Slack(units=units, near_tie=0.16, max_abs=1.0, narrow=units > 16)
            (one,) = compare_runner(runner, reference, batches, slack)
            counts.append(one.comparisons[0].undetermined)
    assert counts[0] == 0 < counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["argmax", "a top-k that is no site", "round", "ids", "routed behind an argmax"])
def test_builds_pass_on_both_engines(name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'targets = ["ort-cpu", "openvino"]\n{FEW_SAMPLES}', encoding="utf-8")
    report = build(chooser(name), ids_of, [SHAPE], out=tmp_path / "built", config=config)
    assert report.verdict.status == "pass", report.verdict.reasons


@pytest.mark.parametrize(("divisor", "expected"), [(0.25, 0.2499), (torch.tensor(0.25), 0.2499), (None, 0.24)])
def test_a_jump_of_a_remainder_is_told_by_its_divisor(divisor: Tensor | float | None, expected: float) -> None:
    """At a multiple of the divisor the remainder jumps by the divisor, and the holder keeps the expected value."""
    graph = fx.Graph()
    x, period = graph.placeholder("x"), graph.placeholder("period")
    aten = torch.ops.aten
    args, target = {
        type(None): ((x,), aten.frac.default),
        float: ((x, divisor), aten.remainder.Scalar),
        Tensor: ((x, period), aten.remainder.Tensor),
    }[type(divisor)]
    wrapped = graph.call_function(target, args)
    choice = Choice(node=wrapped, told="", origins=(x,), chain=())
    holder = Holder([choice], {wrapped.name: (torch.tensor([expected]),)})
    holder(period, lambda: divisor)
    moved = torch.tensor([0.0001 if divisor is not None else 0.2401])
    result = holder(wrapped, lambda: moved)
    # A small change of the input changes the remainder, and is no jump.
    assert result.item() == pytest.approx(expected if divisor is not None else 0.2401)
