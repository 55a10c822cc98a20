"""Finds the rows of an output that a model determines, although it makes discrete choices that are not routing sites.

An input can be so close to the edge of a choice that rounding decides. In a row of one repeated token, all scores are
equal but for rounding, so its argmax can be any of them. There the reference is as arbitrary as the candidate. This is
measured on the reference alone, without the candidate: the values that each choice reads are moved up and down by as
much as a sound engine may be off. A row of an output that then moves by more than half of what the gate allows is not
judged. A choice whose jump is not visible in the output, such as `x > 0` in a leaky ReLU, leaves every row judged.

Shape legend: B batch, R rows of an output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mod_export.judge.compare import Slack
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference, Traced
from mod_export.types import Site

if TYPE_CHECKING:
    from mod_export.judge.choices import Choice, Recorder

Rows = Callable[[int, np.ndarray], np.ndarray]
"""(n, the n-th output) -> its rows that are compared."""
MOST_BLAMED = 8
"""Number of choices that are tried one by one if several can jump: the report names one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Movement:
    """How far the reference moves when its discrete choices are pushed across edges that are close.

    Attributes:
        outputs: for each output float64 (R,), the largest change of a value in each compared row; infinite if a value
            becomes NaN.
        scores: site -> float64 (B,), the largest change of a score in each row; infinite if the tokens that can be
            selected change.
        told: the operation that decides, and its place; empty if nothing moves.
    """

    outputs: tuple[np.ndarray, ...]
    scores: Mapping[Site, np.ndarray]
    told: str = ""


def movement(
    reference: Reference, batch: Batch, routing: Mapping[Site, np.ndarray], slack: Slack, rows: Rows
) -> Movement | None:
    """Measures the movement on one batch with the given selections; None for a program without such choices."""
    from mod_export.judge.choices import Holder, Nudger, Recorder

    choices = reference.choices(batch.bucket)
    if not choices:
        return None
    recorder = Recorder(choices, reading=True)
    base = reference.observed(batch, routing, recorder)
    holder = Holder(choices, recorder.outcomes, recorder.values)
    reference.exact(batch, routing, holder)
    reference.shaken(batch, routing, holder)
    several = any(len(choice.origins) > 1 for choice in choices)
    ways = list(itertools.product((1, -1), (False, True) if several else (False,)))

    def nudgers(some: Sequence[Choice]) -> list[Nudger]:
        return [
            Nudger(some, slack, holder.spread, holder.same, direction, opposed=opposed) for direction, opposed in ways
        ]

    # The first jump of any run is one of these choices. If there is none, all further runs would repeat this one.
    jumping = [
        choice
        for choice in choices
        if any(_differ(choice, one.outcome(choice, recorder.values), recorder) for one in nudgers([choice]))
    ]
    still = Movement(
        tuple(np.zeros(len(rows(n, array))) for n, array in enumerate(base.outputs)),
        {site: np.zeros(len(one.score_BS)) for site, one in base.judged.items()},
    )
    if not jumping:
        return still

    def moved(some: Sequence[Choice]) -> Movement:
        return _moved(base, [reference.observed(batch, routing, one) for one in nudgers(some)], still, rows)

    combined = moved(choices)
    if any(one.is_crowded(choice, recorder.values) for choice in jumping for one in nudgers([choice])[:1]):
        combined = _whole_inputs(combined, base, rows)
    return Movement(combined.outputs, combined.scores, _deciding(jumping, moved))


def _differ(choice: Choice, nudged: object, recorder: Recorder) -> bool:
    import torch

    from mod_export.judge.choices import discrete_parts

    pairs = zip(discrete_parts(nudged), recorder.outcomes[choice.name], strict=True)
    return not all(torch.equal(after, before) for after, before in pairs)


def _moved(base: Traced, runs: Sequence[Traced], still: Movement, rows: Rows) -> Movement:
    outputs, scores = [one.copy() for one in still.outputs], {site: one.copy() for site, one in still.scores.items()}
    for run in runs:
        for n, array in enumerate(run.outputs):
            outputs[n] = np.maximum(outputs[n], _change(rows(n, array), rows(n, base.outputs[n])))
        for site, one in run.judged.items():
            before = base.judged[site]
            change_B = _change(one.score_BS, before.score_BS)
            change_B = np.where((one.open_BS == before.open_BS).all(1), change_B, np.inf)
            scores[site] = np.maximum(scores[site], change_B)
    return Movement(tuple(outputs), scores)


def _whole_inputs(found: Movement, base: Traced, rows: Rows) -> Movement:
    """Gives all rows that belong to one row of the batch the largest change among them. If many entries are nearly
    equal, other entries may win than those that the runs tried.
    """
    outputs = []
    for n, array in enumerate(base.outputs):
        shape = (array.shape[0], *[1] * (array.ndim - 1)) if array.ndim else ()
        dtype = np.float64 if array.dtype.kind == "f" else np.int64
        numbers = np.broadcast_to(np.arange(array.shape[0] if array.ndim else 1).reshape(shape), array.shape)
        batch_R = rows(n, numbers.astype(dtype))[:, :1].reshape(-1).astype(np.int64)
        largest = np.zeros(array.shape[0] if array.ndim else 1)
        if batch_R.size:
            np.maximum.at(largest, batch_R, found.outputs[n])
        outputs.append(largest[batch_R] if batch_R.size else found.outputs[n])
    return Movement(tuple(outputs), found.scores)


def _change(rows: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns float64 (R,), the largest absolute difference in each row."""
    if not rows.size:
        return np.zeros(len(rows))
    rows, before = rows.astype(np.float64), before.astype(np.float64)
    same = (rows == before) | (np.isnan(rows) & np.isnan(before))
    with np.errstate(invalid="ignore"):
        change = np.where(same, 0.0, np.abs(rows - before))
    largest: np.ndarray = np.nan_to_num(change, nan=np.inf, posinf=np.inf).max(1)
    return largest


def _deciding(jumping: Sequence[Choice], moved: Callable[[Sequence[Choice]], Movement]) -> str:
    """Describes the choice that moves the outputs most when it alone is moved."""
    if len(jumping) == 1:
        return jumping[0].told
    most, description = -1.0, jumping[0].told
    for choice in jumping[:MOST_BLAMED]:
        largest = max((float(rows.max(initial=0.0)) for rows in moved([choice]).outputs), default=0.0)
        if largest > most:
            most, description = largest, choice.told
    return description
