"""Parity in parts: which tokens were routed, the error given the same routing, and what follows for the next token.

A routed model is not continuous. When two scores are closer than rounding, either token may be selected, and the logits
then differ by a lot while nothing is wrong; a wrong gate may change them by little while everything is. So the
reference is run with the candidate's routing, which makes the error comparable, and each site's choice is judged by
the reference's own scores given the same choices before it.

What a model of token ids returns is turned into logits, so that all kinds are judged by the same numbers: `logits` are
those of every token, `last` of each row's last real token alone, and `none` are hidden states after the final norm,
which the reference's own head makes logits of. Of any other model all outputs are compared, each by itself.

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
from mod_export.model.protocol import SampledInputs
from mod_export.rows.parity import ErrorNumbers, ParityRow
from mod_export.runtime.logits import negative_log_likelihood
from mod_export.types import PRIMARY, DType, Setting, Site, routed_output

LOGITS = frozenset({PRIMARY["logits"], PRIMARY["last"]})
"""Names of outputs that are logits."""
Rounding = Literal["some", "all", "shaken"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
"""On how many inputs the rounding error of the reference is measured: on one of each kind, of a large model on some of
these; on all; on all, in several runs. Each allows at least what the one before it allows, so the next is needed only
where a candidate fails.
"""


def judge_runner(
    runner: Runner,
    reference: Reference,
    batches: Sequence[Batch],
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """Runs a candidate and judges it; before it fails, rounding is measured on all inputs, and in several runs.

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
    """`judge_runner` for a candidate that is run in several ways, each on inputs of its own."""
    slack = slack_of(gate, setting.dtype)
    for rounding in ROUNDING:
        compared = [one for runner, some in parts for one in compare_runner(runner, reference, some, slack, rounding)]
        row = judge(compared, gate, setting, artifact)
        if row.passed or fails_anyway(compared, gate, setting):
            break
    return row


def undefined_in(reference: Reference, batches: Sequence[Batch]) -> list[Batch]:
    """The inputs on which the reference returns NaN itself, where it is compared."""
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
    """Runs the candidate and the reference on every batch. Where the model makes discrete choices that are no routing
    sites, rows that it does not determine within `slack` are left out, and rounding is measured on all inputs at once.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    # Padded rows have few logits: full ones say more about rounding.
    full = [batch for batch in batches if batch.kind != "padded"] or batches
    measured = _affordable(one_of_each_kind(full), reference) if rounding == "some" else batches
    return [
        found
        for batch in batches
        for found in _compare(runner, reference, batch, slack, rounding if batch in measured else None)
    ]


def slack_of(gate: ParityGate, dtype: DType) -> Slack:
    """What an engine of this dtype may be off by."""
    units = gate.rounding_error * coarser_than_float32(dtype)
    return Slack(units=units, near_tie=gate.near_tie, max_abs=gate.max_abs, narrow=dtype != "float32")


def _affordable(batches: Sequence[Batch], reference: Reference) -> list[Batch]:
    """As many of them as a large model is run on in float64, at least one."""
    tokens = list(itertools.accumulate(batch.bucket.batch * batch.bucket.seq for batch in batches))
    most = affordable_tokens(reference.loaded)
    return [batch for n, batch in enumerate(batches) if n == 0 or tokens[n] <= most]


def _compare(
    runner: Runner, reference: Reference, batch: Batch, slack: Slack, rounding: Rounding | None
) -> list[Comparison]:
    """One comparison for each of the model's own outputs; the first has what was found out about routing."""
    rounding = "shaken" if reference.choices(batch.bucket) else rounding
    outputs = runner.run(batch.read_by(runner.inputs))
    free = reference.free(batch)
    candidate, unusable = _candidate_routing(outputs, free)
    # Positions outside the row cannot be forced; the routing check reports them. A row may be a part of the bucket's,
    # or all of its rows in one.
    last = {site: one.score_BS.shape[1] - 1 for site, one in free.judged.items()}
    routing = {site: index_BK.clip(EMPTY, last[site]) for site, index_BK in candidate.items()}
    same = all(np.array_equal(index_BK, free.routed[site]) for site, index_BK in routing.items())
    given = free if same else reference.forced(batch, routing)
    chosen = free.routed if same else {**free.routed, **routing}
    exact = reference.exact(batch, chosen) if rounding else None
    runs = [given, *(reference.shaken(batch, chosen) if rounding == "shaken" else [])]
    padding = padding_of(reference, batch)
    tokens = [_compared_tokens(reference, batch, array, padding) for array in given.outputs]
    moved = movement(reference, batch, chosen, slack, lambda n, array: _rows(array, tokens[n]))
    sites = {site: _judged(site, index_BK, given, exact, runs, moved, slack) for site, index_BK in candidate.items()}
    sites |= unusable
    found = []
    for n, name in enumerate(reference.output_names):
        rounded = _rounding(exact, runs, n, tokens[n])
        keep_N = _determined(n, moved, rounded, slack)
        expected_NV = _rows(given.outputs[n], tokens[n])
        values_NV, problem = _values_of(outputs, reference, name, given.outputs[n], tokens[n])
        if keep_N is not None:
            expected_NV, values_NV = expected_NV[keep_N], values_NV[keep_N]
        undetermined = 0 if keep_N is None else int((~keep_N).sum())
        # Hidden states are made into logits where a model of token ids returns them; others' are hidden states.
        is_logits = (name in LOGITS or reference.outputs == "none") and len(expected_NV) > 0
        found.append(
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
                text=_text(values_NV, given.logits_BSV, free.logits_BSV, batch) if batch.kind == TEXT else None,
                problems=(*problem, *(() if n else _foreign(outputs, free, reference))),
                left_out=_left_out(undetermined, moved, padding if tokens[n] is not None else None),
                undetermined=undetermined,
            )
        )
    return found


def padding_of(reference: Reference, batch: Batch) -> Padding | None:
    """What an input declares to be padding, found out once for each batch."""
    return reference.remembered(f"padding of {batch.digest}", lambda: declared_padding(reference, batch))


def _determined(n: int, moved: Movement | None, rounded: ErrorNumbers | None, slack: Slack) -> np.ndarray | None:
    """Bool (N,): the rows of an output that stay within half of what rounding is allowed, wherever choices fall."""
    if moved is None:
        return None
    allowed = slack.max_abs if rounded is None else slack.units * rounded.max_abs
    keep_N: np.ndarray = moved.outputs[n] <= allowed / 2
    return keep_N


def _left_out(undetermined: int, moved: Movement | None, padding: Padding | None) -> tuple[LeftOut, ...]:
    found = []
    if padding is not None:
        because = f"{padding.declared_by} declares these positions to be padding"
        found.append(LeftOut(rows=padding.count, because=because))
    if undetermined and moved is not None:
        because = f"rounding decides what {moved.told} gives there, in the reference itself"
        found.append(LeftOut(rows=undetermined, because=because))
    return tuple(found)


def _rows(values: np.ndarray, tokens_BS: np.ndarray | None) -> np.ndarray:
    """Rows of an output: those of some tokens, or all."""
    return rows_of(values if tokens_BS is None else values[tokens_BS])


def _rounding(
    exact: Traced | None, runs: Sequence[Traced], n: int, tokens_BS: np.ndarray | None
) -> ErrorNumbers | None:
    """The largest error in an output of several runs of the reference in float32."""
    if exact is None:
        return None
    exact_NV = _rows(exact.outputs[n], tokens_BS)
    error = error_between(farthest_from(exact_NV, [_rows(run.outputs[n], tokens_BS) for run in runs]), exact_NV)
    if exact_NV.dtype.kind != "f":
        return error
    # A value that comes out exact here may be rounded once by another order of operations.
    least = dict(zip(("max_abs", "rms"), rounded_once(exact_NV, ROUNDOFF["float32"]), strict=True))
    return error.model_copy(update={name: float(np.maximum(getattr(error, name), one)) for name, one in least.items()})


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
    found = routing_of_site(site, index_BK, given.judged[site], exact_BS, rounded_BS)
    if moved is None or not moved.scores[site].any():
        return found
    # As `checks.allowance` bounds the distance of two scores, half of it for each.
    bound = slack.near_tie * found.scale / 2
    if found.rounding is not None:
        unit = max(found.rounding, 2 * ROUNDOFF["float32"] * found.scale)
        bound = min(bound, slack.units * unit)
    judged_B = moved.scores[site] <= bound
    return routing_of_site(site, index_BK, given.judged[site], exact_BS, rounded_BS, judged_B)


def _text(logits_NV: np.ndarray, expected_BSV: np.ndarray, own_BSV: np.ndarray, batch: Batch) -> TextNumbers | None:
    """None of a text whose tokens have no next one, and where only the last tokens were compared."""
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
    """The candidate's positions by site, and the sites whose positions cannot even be compared."""
    usable, unusable = {}, {}
    for site, expected_BK in free.routed.items():
        index = outputs.get(routed_output(site))
        if index is not None and index.shape == expected_BK.shape:
            usable[site] = index.astype(np.int64)
            continue
        B, k = expected_BK.shape
        found = "no routed positions" if index is None else f"routed positions of shape {list(index.shape)}"
        malformed = f"the engine gives {found}, expected [{B}, {k}]"
        unusable[site] = SiteRouting(
            site=site, k=k, routed=B * k, agreed=0, distances=(), min_margin=None, malformed=malformed
        )
    return usable, unusable


def _compared_tokens(
    reference: Reference, batch: Batch, output: np.ndarray, padding: Padding | None
) -> np.ndarray | None:
    """Bool (B, S): the tokens whose logits a candidate gives, padding left out; None of an output of a model of other
    inputs that has no rows of padding.
    """
    if isinstance(reference.loaded, SampledInputs):
        has_rows = padding is not None and output.shape[:2] == padding.real_BS.shape
        return padding.real_BS if padding is not None and has_rows else None
    position_S = np.arange(batch.ids_BS.shape[1])
    if reference.outputs != "last":
        given_BS: np.ndarray = batch.real_BS & (position_S >= batch.judged_from)
        return given_BS
    last_BS: np.ndarray = position_S == batch.lengths_B[:, None] - 1
    return last_BS


def _values_of(
    outputs: Mapping[str, np.ndarray],
    reference: Reference,
    name: str,
    expected: np.ndarray,
    tokens_BS: np.ndarray | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """What `_rows` gives of a candidate's output, as logits where it is hidden states: (N, V). NaN where it gives
    nothing usable, and what is wrong then.
    """
    kind, shape = reference.outputs, expected.shape
    if kind == "last":
        shape = (shape[0], shape[2])
    elif kind == "none":
        shape = (*shape[:2], reference.output_head.d_model)
    array = outputs.get(name)
    if array is None or array.shape != shape:
        found = f"no {name}" if array is None else f"{name} of shape {list(array.shape)}"
        nothing_NV = np.full(_rows(expected, tokens_BS).shape, np.nan, np.float32)
        return nothing_NV, (f"the engine gives {found}, expected {list(shape)}",)
    if kind == "last":
        return array, ()
    rows_NV = _rows(array, tokens_BS)
    return (reference.output_head.head(rows_NV) if kind == "none" else rows_NV), ()


def _foreign(outputs: Mapping[str, np.ndarray], free: Traced, reference: Reference) -> tuple[str, ...]:
    """Outputs that this model does not have."""
    expected = {*reference.output_names, *map(routed_output, free.routed)}
    extra = sorted(name for name in outputs if name not in expected)
    return (f"the engine gives {', '.join(extra)}, which this model does not have",) if extra else ()
