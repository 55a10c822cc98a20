"""Parity in three parts: which tokens were routed, the error given the same routing, and the effect on the next token.

A routed model is not continuous. When two scores are closer than rounding, either token may be selected: the logits
then differ a lot although nothing is wrong. A wrong gate, on the other hand, may change them only a little. So the
reference is run with the candidate's routing, which makes the error comparable. The selection of each site is judged
by the reference's own scores, given the same selections at earlier sites.

The output of a model of token ids is turned into logits, so that the same numbers judge all kinds: `logits` of every
token, `last` for the logits of each row's last real token, and `none` for hidden states after the final norm, which
the reference's own head turns into logits. For any other model all outputs are compared, each by itself.

Shape legend: B batch, S sequence, V vocabulary, D model width, N the tokens that are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from mod_export.config import ParityGate
from mod_export.engines.protocol import Runner
from mod_export.judge.checks import ROUNDOFF, TEXT, Comparison, LeftOut, TextNumbers, coarser_than_float32
from mod_export.judge.compare import (
    EMPTY,
    SiteRouting,
    Slack,
    divergences,
    error_between,
    farthest_from,
    next_token_shortfalls,
    rounded_once,
    routing_of_site,
    rows_of,
)
from mod_export.judge.determined import Movement, movement
from mod_export.judge.inputs import Batch, affordable_tokens, one_of_each_kind
from mod_export.judge.padding import Padding, declared_padding
from mod_export.judge.parity_row import fails_anyway, judge
from mod_export.judge.reference import Reference, Traced
from mod_export.rows.correctness import ErrorNumbers, ParityRow
from mod_export.runtime.logits import negative_log_likelihood
from mod_export.types import PRIMARY, DType, Setting, Site, routed_output

LOGITS = frozenset({PRIMARY["logits"], PRIMARY["last"]})
"""Names of outputs that are logits."""
Rounding = Literal["some", "all", "shaken"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
"""How the rounding error of the reference is measured: `some`, on one input of each kind (for a large model on some of
these); `all`, on all inputs; `shaken`, on all inputs in several runs. Each level allows at least as much error as the
one before, so the next level is needed only if a candidate fails.
"""


def judge_runner(
    runner: Runner,
    reference: Reference,
    batches: Sequence[Batch],
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """Runs a candidate and judges it. Before it fails, rounding is measured on all inputs, then in several runs.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    return judge_runners([(runner, batches)], reference, gate, setting, artifact)


def judge_runners(
    parts: Sequence[tuple[Runner, Sequence[Batch]]],
    reference: Reference,
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """Like `judge_runner`, but the candidate is run in several ways, each on its own inputs."""
    slack = slack_of(gate, setting.dtype)
    for rounding in ROUNDING:
        compared = [
            comparison
            for runner, batches in parts
            for comparison in compare_runner(runner, reference, batches, slack, rounding)
        ]
        row = judge(compared, gate, setting, artifact)
        if row.passed or fails_anyway(compared, gate, setting):
            break
    return row


def undefined_in(reference: Reference, batches: Sequence[Batch]) -> list[Batch]:
    """Returns the inputs for which the reference itself returns NaN in a compared row."""
    return [batch for batch in batches if _is_undefined(reference, batch)]


def _is_undefined(reference: Reference, batch: Batch) -> bool:
    padding = padding_of(reference, batch)
    return any(
        np.isnan(_rows(array, _compared_tokens(reference, batch, array, padding))).any()
        for array in reference.free(batch).outputs
    )


def compare_runner(
    runner: Runner, reference: Reference, batches: Sequence[Batch], slack: Slack, rounding: Rounding = "all"
) -> list[Comparison]:
    """Runs the candidate and the reference on every batch. If the model makes discrete choices that are not routing
    sites, rows that it does not determine within `slack` are left out, and `rounding` is always `shaken`.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    # Padded rows have few logits, so full rows say more about rounding.
    full = [batch for batch in batches if batch.kind != "padded"] or batches
    measured = _affordable(one_of_each_kind(full), reference) if rounding == "some" else batches
    return [
        comparison
        for batch in batches
        for comparison in _compare(runner, reference, batch, slack, rounding if batch in measured else None)
    ]


def slack_of(gate: ParityGate, dtype: DType) -> Slack:
    """Returns how far an engine of this dtype may be off."""
    units = gate.rounding_error * coarser_than_float32(dtype)
    return Slack(units=units, near_tie=gate.near_tie, max_abs=gate.max_abs, narrow=dtype != "float32")


def _affordable(batches: Sequence[Batch], reference: Reference) -> list[Batch]:
    """Returns the first batches, as many as a large model can be run on in float64, at least one."""
    tokens = list(itertools.accumulate(batch.bucket.batch * batch.bucket.seq for batch in batches))
    most = affordable_tokens(reference.model)
    return [batch for n, batch in enumerate(batches) if n == 0 or tokens[n] <= most]


def _compare(
    runner: Runner, reference: Reference, batch: Batch, slack: Slack, rounding: Rounding | None
) -> list[Comparison]:
    """Returns one comparison for each of the model's own outputs; the first one also holds the routing results."""
    rounding = "shaken" if reference.choices(batch.bucket) else rounding
    outputs = runner.run(batch.read_by(runner.inputs))
    free = reference.free(batch)
    candidate, unusable = _candidate_routing(outputs, free)
    # Positions outside the row cannot be forced; the routing check reports them. The row of a site may be a part of a
    # row of the bucket, or all of the bucket's rows joined.
    last = {site: judged.score_BS.shape[1] - 1 for site, judged in free.judged.items()}
    routing = {site: index_BK.clip(EMPTY, last[site]) for site, index_BK in candidate.items()}
    same = all(np.array_equal(index_BK, free.routed[site]) for site, index_BK in routing.items())
    forced = free if same else reference.forced(batch, routing)
    chosen = free.routed if same else {**free.routed, **routing}
    exact = reference.exact(batch, chosen) if rounding else None
    runs = [forced, *(reference.shaken(batch, chosen) if rounding == "shaken" else [])]
    padding = padding_of(reference, batch)
    tokens = [_compared_tokens(reference, batch, array, padding) for array in forced.outputs]
    moved = movement(reference, batch, chosen, slack, lambda n, array: _rows(array, tokens[n]))
    sites = {site: _judged(site, index_BK, forced, exact, runs, moved, slack) for site, index_BK in candidate.items()}
    sites |= unusable
    comparisons = []
    for n, name in enumerate(reference.output_names):
        rounded = _rounding(exact, runs, n, tokens[n])
        keep_N = _determined(n, moved, rounded, slack)
        expected_NV = _rows(forced.outputs[n], tokens[n])
        values_NV, problem = _values_of(outputs, reference, name, forced.outputs[n], tokens[n])
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
                text=_text(values_NV, forced.logits_BSV, free.logits_BSV, batch) if batch.kind == TEXT else None,
                problems=(*problem, *(() if n else _foreign(outputs, free, reference))),
                left_out=_left_out(undetermined, moved, padding if tokens[n] is not None else None),
                undetermined=undetermined,
            )
        )
    return comparisons


def padding_of(reference: Reference, batch: Batch) -> Padding | None:
    """Returns the padding that an input of the batch declares, computed once for each batch."""
    return reference.remembered(f"padding of {batch.digest}", lambda: declared_padding(reference, batch))


def _determined(n: int, moved: Movement | None, rounded: ErrorNumbers | None, slack: Slack) -> np.ndarray | None:
    """Returns bool (N,): rows that choices move by at most half of the allowed error; None if no choice is made."""
    if moved is None:
        return None
    allowed = slack.max_abs if rounded is None else slack.units * rounded.max_abs
    keep_N: np.ndarray = moved.outputs[n] <= allowed / 2
    return keep_N


def _left_out(undetermined: int, moved: Movement | None, padding: Padding | None) -> tuple[LeftOut, ...]:
    left_out = []
    if padding is not None:
        because = f"{padding.declared_by} declares these positions to be padding"
        left_out.append(LeftOut(rows=padding.count, because=because))
    if undetermined and moved is not None:
        because = f"rounding decides what {moved.told} gives there, in the reference itself"
        left_out.append(LeftOut(rows=undetermined, because=because))
    return tuple(left_out)


def _rows(values: np.ndarray, tokens_BS: np.ndarray | None) -> np.ndarray:
    """Returns the rows of some tokens of an output, or all rows."""
    return rows_of(values if tokens_BS is None else values[tokens_BS])


def _rounding(
    exact: Traced | None, runs: Sequence[Traced], n: int, tokens_BS: np.ndarray | None
) -> ErrorNumbers | None:
    """Returns the error of one output, where each element is that of the float32 run farthest from float64."""
    if exact is None:
        return None
    exact_NV = _rows(exact.outputs[n], tokens_BS)
    error = error_between(farthest_from(exact_NV, [_rows(run.outputs[n], tokens_BS) for run in runs]), exact_NV)
    if exact_NV.dtype.kind != "f":
        return error
    # A value that is exact here may still be rounded once in another order of operations.
    least = dict(zip(("max_abs", "rms"), rounded_once(exact_NV, ROUNDOFF["float32"]), strict=True))
    return error.model_copy(update={name: float(np.maximum(getattr(error, name), low)) for name, low in least.items()})


def _judged(
    site: Site,
    index_BK: np.ndarray,
    given: Traced,
    exact: Traced | None,
    runs: Sequence[Traced],
    moved: Movement | None,
    slack: Slack,
) -> SiteRouting:
    exact_BS = None if exact is None else exact.judged[site].score_BS
    scores = [run.judged[site].score_BS for run in runs]
    rounded_BS = None if exact_BS is None else farthest_from(exact_BS, scores)
    result = routing_of_site(site, index_BK, given.judged[site], exact_BS, rounded_BS)
    if moved is None or not moved.scores[site].any():
        return result
    # `checks.allowance` bounds the distance of two scores; each score gets half of that bound.
    bound = slack.near_tie * result.scale / 2
    if result.rounding is not None:
        unit = max(result.rounding, 2 * ROUNDOFF["float32"] * result.scale)
        bound = min(bound, slack.units * unit)
    judged_B = moved.scores[site] <= bound
    return routing_of_site(site, index_BK, given.judged[site], exact_BS, rounded_BS, judged_B)


def _text(logits_NV: np.ndarray, expected_BSV: np.ndarray, own_BSV: np.ndarray, batch: Batch) -> TextNumbers | None:
    """Returns None for texts of one token, and if only the last token of each row was compared."""
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
    output is missing or has a wrong shape: NaN, and a message that says so.
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
