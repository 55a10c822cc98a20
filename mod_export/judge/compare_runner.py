"""Compares a candidate with the reference on inputs: the candidate runs, and the reference runs with its routing.

How much of a difference rounding can explain is measured on some inputs at first, and on any other one when it is asked
for: that takes three more runs of the reference, and up to two that are not kept any more.

Shape legend: B batch, S sequence, V vocabulary, N the tokens that are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from mod_export.config import ParityGate
from mod_export.engines.protocol import Runner
from mod_export.judge.causality import Padding, declared_padding
from mod_export.judge.checks import TEXT, Comparison, LeftOut, TextNumbers, coarser_than_float32
from mod_export.judge.choices import movement
from mod_export.judge.compare import (
    EMPTY,
    ROUNDOFF,
    SiteRouting,
    Slack,
    direction_of,
    divergences,
    error_between,
    farthest_from,
    next_token_shortfalls,
    rounded_once,
    routing_of_site,
    rows_of,
)
from mod_export.judge.inputs import Batch, affordable_tokens, one_of_each_kind
from mod_export.judge.reference import Reference, Traced
from mod_export.rows.correctness import ErrorNumbers
from mod_export.runtime.logits import negative_log_likelihood
from mod_export.types import PRIMARY, DType, Site, routed_output

LOGITS = frozenset({PRIMARY["logits"], PRIMARY["last"]})
"""Names of outputs that are logits."""
Measured = Literal["no", "once", "several"]
"""In how many runs in float32 the rounding error of the reference is measured on an input: each allows at least as much
error as the one before.
"""


@dataclass(frozen=True)
class ComparedInput:
    """Holds what a candidate and the reference give on one input. The candidate need not run again if more has to be
    known about rounding.

    Attributes:
        comparisons: one for each of the model's own outputs; the first one also holds the routing results.
        batch: the input.
        selected: site -> positions that the candidate selected, int64 (B, k), for sites that can be compared.
        reference: the reference that ran with this selection.
        slack: how far the candidate may be off.
        measured: in how many runs rounding was measured.
    """

    comparisons: tuple[Comparison, ...]
    batch: Batch
    selected: Mapping[Site, np.ndarray]
    reference: Reference
    slack: Slack
    measured: Measured

    @property
    def largest_error(self) -> float:
        """Returns the largest error of a value in any output."""
        return max((comparison.error.max_abs for comparison in self.comparisons), default=0.0)

    def measured_in_several_runs(self) -> ComparedInput:
        """Returns the same comparisons with the rounding error of the reference measured in several runs."""
        if self.measured == "several":
            return self
        runs = _ForcedRuns(self.reference, self.batch, self.selected, self.slack, "several")
        comparisons = tuple(
            replace(
                comparison,
                rounding=runs.rounding_error(n),
                sites=tuple(
                    runs.selection(routing.site, self.selected[routing.site])
                    if routing.site in self.selected
                    else routing
                    for routing in comparison.sites
                ),
            )
            for n, comparison in enumerate(self.comparisons)
        )
        return replace(self, comparisons=comparisons, measured="several")


def compare_runner(runner: Runner, reference: Reference, batches: Sequence[Batch], slack: Slack) -> list[ComparedInput]:
    """Runs the candidate and the reference on every batch. Rounding is measured once, on an input of each kind but the
    padded one; for a large model on some of these. If the model makes discrete choices that are not routing sites, rows
    that it does not determine within `slack` are left out, and rounding is measured in several runs on all inputs.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    # Padded rows have few logits, so full rows say more about rounding.
    full = [batch for batch in batches if batch.kind != "padded"] or batches
    first = _affordable(one_of_each_kind(full), reference)
    return [_compared(runner, reference, batch, slack, "once" if batch in first else "no") for batch in batches]


def undefined_in(reference: Reference, batches: Sequence[Batch]) -> list[Batch]:
    """Returns the inputs for which the reference itself returns NaN in a compared row."""
    return [
        batch
        for batch in batches
        if reference.remembered(f"whether {batch.digest} is undefined", partial(_is_undefined, reference, batch))
    ]


def _is_undefined(reference: Reference, batch: Batch) -> bool:
    padding = padding_of(reference, batch)
    return any(
        np.isnan(_rows(array, _compared_tokens(reference, batch, array, padding))).any()
        for array in reference.free(batch).outputs
    )


def slack_of(gate: ParityGate, dtype: DType) -> Slack:
    """Returns how far an engine of this dtype may be off."""
    units = gate.rounding_error * coarser_than_float32(dtype)
    return Slack(units=units, near_tie=gate.near_tie, max_abs=gate.max_abs, narrow=dtype != "float32")


def _affordable(batches: Sequence[Batch], reference: Reference) -> list[Batch]:
    """Returns the first batches, as many as a large model can be run on in float64, at least one."""
    tokens = list(itertools.accumulate(batch.bucket.batch * batch.bucket.seq for batch in batches))
    most = affordable_tokens(reference.model, max((batch.bucket.seq for batch in batches), default=1))
    return [batch for n, batch in enumerate(batches) if n == 0 or tokens[n] <= most]


def _compared(runner: Runner, reference: Reference, batch: Batch, slack: Slack, measured: Measured) -> ComparedInput:
    measured = "several" if reference.choices(batch.bucket) else measured
    outputs = runner.run(batch.read_by(runner.inputs))
    free = reference.free(batch)
    selected, unusable = _candidate_routing(outputs, free)
    runs = _ForcedRuns(reference, batch, selected, slack, measured)
    sites = unusable | {site: runs.selection(site, index_BK) for site, index_BK in selected.items()}
    comparisons = []
    for n, name in enumerate(reference.output_names):
        rounded, expected_NV = runs.rounding_error(n), runs.rows(n, runs.forced.outputs[n])
        values_NV, problem = _values_of(outputs, reference, name, runs.forced.outputs[n], runs.tokens[n])
        keep_N = runs.determined(n, rounded)
        if keep_N is not None:
            expected_NV, values_NV = expected_NV[keep_N], values_NV[keep_N]
        undetermined = 0 if keep_N is None else int((~keep_N).sum())
        # `none` is the output of models of token ids only, and their hidden states have been turned into logits.
        is_logits = (name in LOGITS or reference.outputs == "none") and len(expected_NV) > 0
        comparisons.append(
            Comparison(
                kind=batch.kind,
                output=name,
                sites=() if n else tuple(sites[site] for site in free.routed),
                error=error_between(values_NV, expected_NV),
                tokens=len(expected_NV),
                values=expected_NV.size,
                rounding=rounded,
                shortfalls=next_token_shortfalls(values_NV, expected_NV) if is_logits else None,
                divergences=divergences(values_NV, expected_NV) if is_logits else None,
                text=_text(values_NV, runs.forced.logits_BSV, free.logits_BSV, batch) if batch.kind == TEXT else None,
                problems=(*problem, *(() if n else _foreign(outputs, free, reference))),
                left_out=runs.left_out(n, undetermined),
                undetermined=undetermined,
            )
        )
    return ComparedInput(tuple(comparisons), batch, selected, reference, slack, measured)


class _ForcedRuns:
    """Runs of the reference on one batch with a candidate's routing, and the rows of its outputs that can be compared.

    Attributes:
        forced: the float32 run.
        tokens: the tokens to compare, for each output (see `_compared_tokens`).
    """

    def __init__(
        self,
        reference: Reference,
        batch: Batch,
        selected: Mapping[Site, np.ndarray],
        slack: Slack,
        measured: Measured,
    ) -> None:
        free = reference.free(batch)
        # Positions outside the row cannot be forced; the routing check reports them. The row of a site may be a part of
        # a row of the bucket, or all of the bucket's rows joined.
        last = {site: judged.score_BS.shape[1] - 1 for site, judged in free.judged.items()}
        routing = {site: index_BK.clip(EMPTY, last[site]) for site, index_BK in selected.items()}
        same = all(np.array_equal(index_BK, free.routed[site]) for site, index_BK in routing.items())
        forced_routing = free.routed if same else {**free.routed, **routing}
        self.forced = free if same else reference.forced(batch, routing)
        self._slack = slack
        ordered = reference.ordered_sites(batch.bucket)
        self._directions = {site: direction_of(free.routed[site], free.judged[site]) for site in ordered}
        self._exact = reference.exact(batch, forced_routing) if measured != "no" else None
        self._runs = [self.forced, *(reference.shaken(batch, forced_routing) if measured == "several" else [])]
        self._padding = padding_of(reference, batch)
        self.tokens = [_compared_tokens(reference, batch, array, self._padding) for array in self.forced.outputs]
        self._moved = movement(reference, batch, forced_routing, slack, self.rows)

    def rows(self, n: int, values: np.ndarray) -> np.ndarray:
        """Returns the rows of the n-th output that are compared."""
        return _rows(values, self.tokens[n])

    def rounding_error(self, n: int) -> ErrorNumbers | None:
        """Returns the rounding error of the n-th output, with each element from the float32 run that is farthest from
        float64; for floats at least the error of rounding each value once. None if it is not measured.
        """
        if self._exact is None:
            return None
        exact_NV = self.rows(n, self._exact.outputs[n])
        farthest_NV = farthest_from(exact_NV, [self.rows(n, run.outputs[n]) for run in self._runs])
        error = error_between(farthest_NV, exact_NV)
        if exact_NV.dtype.kind != "f":
            return error
        # A value that is exact here may still be rounded once in another order of operations.
        max_abs, rms = rounded_once(exact_NV, ROUNDOFF["float32"])
        least = {"max_abs": float(np.maximum(error.max_abs, max_abs)), "rms": float(np.maximum(error.rms, rms))}
        return error.model_copy(update=least)

    def determined(self, n: int, rounded: ErrorNumbers | None) -> np.ndarray | None:
        """Returns bool (N,): rows that choices move by at most half of the allowed error; None if no choice is made."""
        if self._moved is None:
            return None
        allowed = self._slack.max_abs if rounded is None else self._slack.units * rounded.max_abs
        keep_N: np.ndarray = self._moved.outputs[n] <= allowed / 2
        return keep_N

    def left_out(self, n: int, undetermined: int) -> tuple[LeftOut, ...]:
        """Returns the rows of the n-th output that are not compared, the `undetermined` ones last."""
        left_out = []
        if self._padding is not None and self.tokens[n] is not None:
            because = f"{self._padding.declared_by} declares these positions to be padding"
            left_out.append(LeftOut(rows=self._padding.count, because=because))
        if undetermined and self._moved is not None:
            because = f"rounding decides what {self._moved.told} gives there, in the reference itself"
            left_out.append(LeftOut(rows=undetermined, because=because))
        return tuple(left_out)

    def selection(self, site: Site, index_BK: np.ndarray) -> SiteRouting:
        """Compares the candidate's selection at a site; rows in which choices move the scores too far are left out."""
        judged = self.forced.judged[site]
        exact_BS = None if self._exact is None else self._exact.judged[site].score_BS
        scores = [run.judged[site].score_BS for run in self._runs]
        rounded_BS = None if exact_BS is None else farthest_from(exact_BS, scores)
        direction = self._directions.get(site, 0)
        result = routing_of_site(site, index_BK, judged, exact_BS, rounded_BS, direction=direction)
        if self._moved is None or not self._moved.scores[site].any():
            return result
        # `checks.allowance` bounds the distance of two scores; each score gets half of that bound.
        bound = self._slack.near_tie * result.scale / 2
        if result.rounding is not None:
            unit = max(result.rounding, 2 * ROUNDOFF["float32"] * result.scale)
            bound = min(bound, self._slack.units * unit)
        judged_B = self._moved.scores[site] <= bound
        return routing_of_site(site, index_BK, judged, exact_BS, rounded_BS, judged_B, direction)


def padding_of(reference: Reference, batch: Batch) -> Padding | None:
    """Returns the padding that an input of the batch declares, computed once for each batch."""
    return reference.remembered(f"padding of {batch.digest}", lambda: declared_padding(reference, batch))


def _rows(values: np.ndarray, tokens_BS: np.ndarray | None) -> np.ndarray:
    """Returns the rows of some tokens of an output, or all rows."""
    return rows_of(values if tokens_BS is None else values[tokens_BS])


def _text(logits_NV: np.ndarray, expected_BSV: np.ndarray, own_BSV: np.ndarray, batch: Batch) -> TextNumbers | None:
    """Returns the sums over the text of a batch; None for texts of one token, and if only the last token of each row
    was compared.
    """
    if batch.ids_BS.shape[1] < 2 or logits_NV.size != expected_BSV.size:
        return None
    nll, tokens = negative_log_likelihood(logits_NV.reshape(expected_BSV.shape), batch.ids_BS)
    own_NV = own_BSV.reshape(logits_NV.shape)
    return TextNumbers(
        tokens=tokens,
        nll=nll,
        reference_nll=negative_log_likelihood(expected_BSV, batch.ids_BS)[0],
        own_nll=negative_log_likelihood(own_BSV, batch.ids_BS)[0],
        positions=len(own_NV),
        agreed=int(np.sum(logits_NV.argmax(-1) == own_NV.argmax(-1))),
    )


def _candidate_routing(
    outputs: Mapping[str, np.ndarray], free: Traced
) -> tuple[dict[Site, np.ndarray], dict[Site, SiteRouting]]:
    """Returns the candidate's positions by site, and the result for sites whose positions cannot be compared."""
    usable, unusable = {}, {}
    for site, expected_BK in free.routed.items():
        index = outputs.get(routed_output(site))
        if index is not None and index.shape == expected_BK.shape:
            usable[site] = index.astype(np.int64)
            continue
        B, k = expected_BK.shape
        actual = "no routed positions" if index is None else f"routed positions of shape {list(index.shape)}"
        malformed = f"the engine gives {actual}, expected [{B}, {k}]"
        unusable[site] = SiteRouting(
            site=site, k=k, routed=B * k, agreed=0, distances=(), min_margin=None, malformed=malformed
        )
    return usable, unusable


def _compared_tokens(
    reference: Reference, batch: Batch, output: np.ndarray, padding: Padding | None
) -> np.ndarray | None:
    """Returns bool (B, S), the tokens to compare: those with logits from the candidate, without padding. None for an
    output of a `SampledInputs` model if it has no padded rows; all its rows are then compared.
    """
    if reference.model.tokens is None:
        has_rows = padding is not None and output.shape[:2] == padding.real_BS.shape
        return padding.real_BS if padding is not None and has_rows else None
    position_S = np.arange(batch.ids_BS.shape[1])
    if reference.outputs != "last":
        judged_BS: np.ndarray = batch.real_BS & (position_S >= batch.judged_from)
        return judged_BS
    last_BS: np.ndarray = position_S == batch.lengths_B[:, None] - 1
    return last_BS


def _values_of(
    outputs: Mapping[str, np.ndarray],
    reference: Reference,
    name: str,
    expected: np.ndarray,
    tokens_BS: np.ndarray | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the rows (N, V) of a candidate's output, with hidden states turned into logits, and no message. If the
    output is missing or has a wrong shape, returns NaN and a message that says so.
    """
    kind, shape = reference.outputs, expected.shape
    if kind == "last":
        shape = (shape[0], shape[2])
    elif kind == "none":
        shape = (*shape[:2], reference.model.d_model)
    array = outputs.get(name)
    if array is None or array.shape != shape:
        actual = f"no {name}" if array is None else f"{name} of shape {list(array.shape)}"
        nothing_NV = np.full(_rows(expected, tokens_BS).shape, np.nan, np.float32)
        return nothing_NV, (f"the engine gives {actual}, expected {list(shape)}",)
    if kind == "last":
        return array, ()
    rows_NV = _rows(array, tokens_BS)
    return (reference.logits_of(rows_NV) if kind == "none" else rows_NV), ()


def _foreign(outputs: Mapping[str, np.ndarray], free: Traced, reference: Reference) -> tuple[str, ...]:
    """Returns a message if the candidate has outputs that this model does not have."""
    expected = {*reference.output_names, *map(routed_output, free.routed)}
    extra = sorted(name for name in outputs if name not in expected)
    return (f"the engine gives {', '.join(extra)}, which this model does not have",) if extra else ()
