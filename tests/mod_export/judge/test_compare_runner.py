"""What rounding can explain is measured on some inputs, and before a candidate fails on one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from comparisons import errors
from small_graphs import session

from mod_export.config import ParityGate, config_from_toml
from mod_export.engines.ort_session import OrtRunner
from mod_export.engines.protocol import Runner
from mod_export.judge.checks import judge
from mod_export.judge.compare_runner import ComparedInput, compare_runner, slack_of
from mod_export.judge.inputs import Batch
from mod_export.judge.parity import is_hopeless, judge_runner
from mod_export.judge.reference import Reference
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Setting

GATE = config_from_toml(None).parity.float32
SETTING = Setting(role="forward", target="ort-cpu", model="mod", bucket=Bucket(2, 16), dtype="float32")


@pytest.fixture
def runner(graph: ir.Model) -> Iterator[Runner]:
    with OrtRunner(session(graph), "candidate", 1) as runner:
        yield runner


@pytest.fixture
def compared(runner: Runner, reference: Reference, batches: list[Batch]) -> list[ComparedInput]:
    return compare_runner(runner, reference, batches, slack_of(GATE, "float32"))


def rounding_of(inputs: list[ComparedInput]) -> float:
    return judge([c for one in inputs for c in one.comparisons], GATE, SETTING).rounding_error


def test_rounding_is_measured_once_on_one_input_of_each_kind(compared: list[ComparedInput]) -> None:
    measured = [c.kind for one in compared for c in one.comparisons if c.rounding is not None]
    assert measured == ["text", "random", "ties"]


def test_several_runs_allow_at_least_as_much(compared: list[ComparedInput]) -> None:
    several = [one.measured_in_several_runs() for one in compared]
    for before, after in zip(compared, several, strict=True):
        for once, again in zip(before.comparisons, after.comparisons, strict=True):
            assert again.rounding is not None
            assert once.rounding is None or 0 < once.rounding.max_abs <= again.rounding.max_abs
            # Everything else is as it was: the candidate did not run again.
            assert replace(again, rounding=once.rounding, sites=once.sites) == once
            assert [site.agreed for site in again.sites] == [site.agreed for site in once.sites]
            assert all(site.rounding is not None for site in again.sites)
    assert all(one.measured_in_several_runs() is one for one in several)
    assert rounding_of(several) >= rounding_of(compared)


class Wrong:
    """A runner whose logits are all off by the same number."""

    def __init__(self, runner: Runner, by: float) -> None:
        self.inputs, self._runner, self._by, self.runs = runner.inputs, runner, by, 0

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        outputs = self._runner.run(feeds)
        return {**outputs, "logits": outputs["logits"] + np.float32(self._by)}


def judged(runner: Wrong, reference: Reference, batches: list[Batch], gate: ParityGate = GATE) -> ParityRow:
    return judge_runner([(runner, batches)], reference, gate, SETTING)


def test_before_a_candidate_fails_rounding_is_measured_on_every_input(
    runner: Runner, reference: Reference, batches: list[Batch]
) -> None:
    """A constant added to all logits changes no probability, so only the error says that it is wrong."""
    wrong = Wrong(runner, 1e-4)
    row = judged(wrong, reference, batches)
    assert not row.passed
    assert row.rounding_tokens == row.tokens
    assert "max abs error 0.000101" in row.reasons[0]
    assert wrong.runs == len(batches)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ComparedInput]:
    """The inputs on which rounding was measured in several runs, in this order."""
    found: list[ComparedInput] = []
    measure = ComparedInput.measured_in_several_runs

    def noted(one: ComparedInput) -> ComparedInput:
        found.append(measure(one))
        return found[-1]

    monkeypatch.setattr(ComparedInput, "measured_in_several_runs", noted)
    return found


SMALL = GATE.model_copy(update={"rounding_error": 0.05, "rounding_error_rms": 1e9})
"""What this gate allows of the measured rounding errors is too little for any candidate."""


def test_the_input_with_the_largest_error_is_measured_first(
    runner: Runner, reference: Reference, batches: list[Batch], measured: list[ComparedInput]
) -> None:
    """It is the one that rounding may explain most of, and no other is measured if it explains enough."""
    row = judged(Wrong(runner, 0.0), reference, batches, SMALL)
    errors = [one.largest_error for one in measured]
    assert len(errors) == len(batches)
    assert errors == sorted(errors, reverse=True)
    rounding = max(c.rounding.max_abs for c in measured[0].comparisons if c.rounding is not None)
    units = (1 + 1e-9) * row.error.max_abs / rounding
    measured.clear()
    assert judged(Wrong(runner, 0.0), reference, batches, SMALL.model_copy(update={"rounding_error": units})).passed
    assert len(measured) <= 1


def test_one_that_passes_is_measured_no_further(runner: Runner, reference: Reference, batches: list[Batch]) -> None:
    once = judged(Wrong(runner, 0.0), reference, batches)
    assert once.passed
    assert once.rounding_tokens < once.tokens
    # A limit that the largest rounding error of all runs allows, and that of one run may not.
    failed = judged(Wrong(runner, 0.0), reference, batches, SMALL)
    units = (1 + 1e-9) * failed.error.max_abs / failed.rounding_error
    row = judged(Wrong(runner, 0.0), reference, batches, SMALL.model_copy(update={"rounding_error": units}))
    assert row.passed, row.reasons
    assert once.rounding_error <= row.rounding_error <= failed.rounding_error


def test_a_gross_error_needs_several_runs_on_one_input_only(
    runner: Runner, reference: Reference, batches: list[Batch], measured: list[ComparedInput]
) -> None:
    row = judged(Wrong(runner, 10.0), reference, batches)
    assert not row.passed
    assert len(measured) == 1
    assert row.rounding_tokens < row.tokens


def test_an_input_that_fails_is_measured_before_others_decide(compared: list[ComparedInput]) -> None:
    """Its values may be much larger than those of the inputs that were measured."""

    def with_error(one: ComparedInput, error: float) -> ComparedInput:
        (comparison,) = one.comparisons
        return replace(one, comparisons=(replace(comparison, error=errors(error)),))

    first, second, *_ = compared
    sound = first.measured_in_several_runs()
    assert not is_hopeless([sound, with_error(second, 10.0)], GATE, SETTING)
    assert is_hopeless([sound, with_error(second.measured_in_several_runs(), 10.0)], GATE, SETTING)
    assert is_hopeless([with_error(sound, 10.0), second], GATE, SETTING)
    # One run proves nothing, and a NaN needs no proof.
    assert not is_hopeless([with_error(first, 10.0), second], GATE, SETTING)
    assert is_hopeless([with_error(first, math.nan), second], GATE, SETTING)


def test_what_no_rounding_explains_is_not_measured_further(
    runner: Runner, reference: Reference, batches: list[Batch]
) -> None:
    row = judged(Wrong(runner, math.nan), reference, batches)
    assert not row.passed
    assert row.rounding_tokens < row.tokens
