"""Parity in three parts: which tokens were routed, the error given the same routing, and the effect on the next token.
If a candidate fails, the place of the fault is searched for as well (`locate.py`).

A routed model is not continuous. When two scores are closer than rounding, either token may be selected: the logits
then differ a lot although nothing is wrong. A wrong gate, on the other hand, may change them only a little. So the
reference is run with the candidate's routing, which makes the error comparable. The selection of each site is judged
by the reference's own scores, given the same selections at earlier sites.

The output of a model of token ids is turned into logits, so that the same numbers judge all kinds: `logits` of every
token, `last` for the logits of each row's last real token, and `none` for hidden states after the final norm, which
the reference's own head turns into logits. For any other model all outputs are compared, each by itself.

Ties are judged separately. If scores are exactly equal, the earlier token gets the slot, in every engine. Equal tokens
seldom have bit-equal scores, because kernels sum different rows in different orders. A router with all weights zero
makes scores equal everywhere. Then every site that ranks tokens must select the first k real tokens of its row,
whatever the text. Where tokens choose experts, the rule for ties alone decides which experts they choose.

Shape legend: B batch, S sequence, V vocabulary, D model width, N the tokens that are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from mod_export.config import BuildConfig, ParityGate
from mod_export.engines.protocol import Runner
from mod_export.errors import BuildError, BuildFolderError, TargetError
from mod_export.judge.candidates import Candidate
from mod_export.judge.causality import Padding, declared_padding
from mod_export.judge.checks import (
    MADE_OF_TIES,
    REFERENCE,
    TEXT,
    Comparison,
    LeftOut,
    TextNumbers,
    coarser_than_float32,
    failed_row,
    fails_anyway,
    judge,
)
from mod_export.judge.choices import movement
from mod_export.judge.compare import (
    EMPTY,
    ROUNDOFF,
    Judged,
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
    wrong_slots,
)
from mod_export.judge.inputs import Batch, TextOf, affordable_tokens, batches_of, one_of_each_kind
from mod_export.judge.locate import (
    first_faulty_layer,
    locate_against_reference,
    locate_in_graph,
    origin_in_graph,
    origin_in_reference,
)
from mod_export.judge.reference import Reference, Traced
from mod_export.model.model import Model
from mod_export.rows.correctness import ErrorNumbers, LeftOutRows, Located, ParityRow
from mod_export.runtime.logits import negative_log_likelihood
from mod_export.types import PRIMARY, QUANTIZED, DType, Graph, Setting, Site, is_expert, routed_output

LOGITS = frozenset({PRIMARY["logits"], PRIMARY["last"]})
"""Names of outputs that are logits."""
Rounding = Literal["some", "all", "shaken"]
ROUNDING: tuple[Rounding, ...] = get_args(Rounding)
"""How the rounding error of the reference is measured: `some`, on one input of each kind (for a large model on some of
these); `all`, on all inputs; `shaken`, on all inputs in several runs. Each level allows at least as much error as the
one before, so the next level is needed only if a candidate fails.
"""
MOST_REASONS = 4
"""Number of reasons listed beside the place of the fault; further reasons are only counted."""
Fresh = Callable[[Graph], bytes]
"""Returns the bytes of a fresh export of a graph."""


def parity_of(
    root: Path,
    candidate: Candidate,
    reference: Reference,
    config: BuildConfig,
    fresh: Fresh,
    text_of: TextOf | None = None,
) -> ParityRow:
    """Judges a candidate on inputs of every kind. A candidate that cannot be loaded or run fails with the
    reason. Integer weights are judged on text, so `text_of` gives text to a model that has none of its own.
    """
    is_quantized = candidate.setting.dtype in QUANTIZED
    batches = batches_of(reference, candidate.setting.bucket, config, text_of if is_quantized else None)
    if candidate.engine_judged:
        batches = one_of_each_kind(batches)
    gate = config.parity.gate(candidate.setting.dtype)
    undefined = undefined_in(reference, batches)
    if any(batch.kind not in MADE_OF_TIES for batch in undefined):
        return failed_row(_undefined(reference, undefined, batches), gate, candidate.setting, candidate.path)
    batches = [batch for batch in batches if batch not in undefined]
    try:
        with candidate.open(root, config) as runner:
            row = judge_runner([(runner, batches)], reference, gate, candidate.setting, candidate.path)
        exact, wrong = _ties(root, candidate, reference, batches, config)
    except (BuildError, TargetError) as error:
        row = failed_row(f"cannot be run: {error}", gate, candidate.setting, candidate.path)
    else:
        # Inputs that reasons name come first, so that the place is searched where the fault shows.
        kinds = {reason.partition(":")[0] for reason in row.reasons}
        batches = sorted(batches, key=lambda batch: batch.kind not in kinds)
        reasons = (*row.reasons, *wrong)
        left_out = (*row.left_out, *_artificial(reference, undefined))
        row = row.model_copy(
            update={"ties_exact": exact, "reasons": reasons, "passed": not reasons, "left_out": left_out}
        )
    if row.passed:
        return row
    try:
        places = _places(root, candidate, reference, batches, config, fresh, row)
    except (BuildError, BuildFolderError, TargetError) as error:
        reason = f"the place of the fault was not found: {str(error).splitlines()[0]}"
        return row.model_copy(update={"reasons": (*_first_reasons(row.reasons), reason)})
    located = places[0] if places else None
    return row.model_copy(update={"located": located, "reasons": (*_first_reasons(row.reasons), *map(str, places))})


def _first_reasons(reasons: Sequence[str]) -> tuple[str, ...]:
    """Returns the first reasons, and the number of the others."""
    more = len(reasons) - MOST_REASONS
    return tuple(reasons) if more <= 0 else (*reasons[:MOST_REASONS], f"and {more} more reason{'s'[: more > 1]}")


def _undefined(reference: Reference, undefined: Sequence[Batch], batches: Sequence[Batch]) -> str:
    """Explains why nothing can be compared with the reference."""
    kinds = ", ".join(dict.fromkeys(batch.kind for batch in undefined))
    usual = next(batch for batch in undefined if batch.kind not in MADE_OF_TIES)
    return (
        f"the model itself returns NaN, in {REFERENCE}, on {len(undefined)} of {len(batches)} inputs ({kinds}), "
        f"so there is nothing to compare with: {origin_in_reference(reference, usual)}; its values overflow there, or "
        "these inputs are not what it was made for"
    )


def _artificial(reference: Reference, undefined: Sequence[Batch]) -> list[LeftOutRows]:
    """Lists the inputs made of ties for which the model itself returns NaN."""
    if not undefined:
        return []
    why = f"the model itself returns NaN there: {origin_in_reference(reference, undefined[0])}"
    kinds = tuple(dict.fromkeys(batch.kind for batch in undefined))
    counts = {
        name: sum(len(rows_of(reference.free(batch).outputs[n])) for batch in undefined)
        for n, name in enumerate(reference.output_names)
    }
    return [
        LeftOutRows(output=name, inputs=kinds, rows=count, total=count, because=why) for name, count in counts.items()
    ]


def _places(
    root: Path,
    candidate: Candidate,
    reference: Reference,
    batches: Sequence[Batch],
    config: BuildConfig,
    fresh: Fresh,
    row: ParityRow,
) -> list[Located]:
    """Finds, as far as possible, the place where the candidate goes wrong and the place where it makes NaN."""
    located: Located | None = None
    if candidate.graph is not None and candidate.weights is not None:
        located = locate_in_graph(root, candidate.path, fresh(candidate.graph), batches)
        if located is None and candidate.setting.dtype not in QUANTIZED:
            slack = slack_of(config.parity.gate(candidate.setting.dtype), candidate.setting.dtype)
            located = locate_against_reference(root, candidate.path, reference, batches, slack)
    elif candidate.engine is not None:
        located = locate_by_depth(root, candidate, reference, batches, config)
    errors = (row.error, *(output.error for output in row.further_outputs))
    nan = None
    if candidate.source is not None and row.inputs and any(math.isnan(error.max_abs) for error in errors):
        nan = origin_in_graph(root, candidate.source, batches)
    return [place for place in (located, nan) if place is not None]


def locate_by_depth(
    root: Path, candidate: Candidate, reference: Reference, batches: Sequence[Batch], config: BuildConfig
) -> Located | None:
    """Finds the faulty layer of an engine whose values cannot be read.

    None if the engine contains its weights, or if these inputs do not show the fault.

    Raises:
        BuildError: the engine does not take other weights, or cannot be run.
    """
    if candidate.weights is None:
        return None
    gate = config.parity.gate(candidate.setting.dtype)

    def fails(batch: Batch, weights: Mapping[str, np.ndarray]) -> bool:
        with candidate.open(root, config, weights) as runner:
            parts = [(runner, [batch])]
            return not judge_runner(parts, reference.with_weights(weights), gate, candidate.setting).passed

    return first_faulty_layer(reference.model, batches, fails)


# Comparison of a runner with the reference


def judge_runner(
    parts: Sequence[tuple[Runner, Sequence[Batch]]],
    reference: Reference,
    gate: ParityGate,
    setting: Setting,
    artifact: str | None = None,
) -> ParityRow:
    """Runs a candidate in one or more ways, each on its own inputs, and judges it. Before it fails by a limit that
    depends on rounding, rounding is measured on all inputs, and then in several runs.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
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
    outputs = runner.run(batch.read_by(runner.inputs))
    free = reference.free(batch)
    candidate, unusable = _candidate_routing(outputs, free)
    runs = _ForcedRuns(reference, batch, candidate, slack, rounding)
    sites = unusable | {site: runs.selection(site, index_BK) for site, index_BK in candidate.items()}
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
    return comparisons


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
        candidate: Mapping[Site, np.ndarray],
        slack: Slack,
        rounding: Rounding | None,
    ) -> None:
        rounding = "shaken" if reference.choices(batch.bucket) else rounding
        free = reference.free(batch)
        # Positions outside the row cannot be forced; the routing check reports them. The row of a site may be a part of
        # a row of the bucket, or all of the bucket's rows joined.
        last = {site: judged.score_BS.shape[1] - 1 for site, judged in free.judged.items()}
        routing = {site: index_BK.clip(EMPTY, last[site]) for site, index_BK in candidate.items()}
        same = all(np.array_equal(index_BK, free.routed[site]) for site, index_BK in routing.items())
        forced_routing = free.routed if same else {**free.routed, **routing}
        self.forced = free if same else reference.forced(batch, routing)
        self._slack = slack
        ordered = reference.ordered_sites(batch.bucket)
        self._directions = {site: direction_of(free.routed[site], free.judged[site]) for site in ordered}
        self._exact = reference.exact(batch, forced_routing) if rounding else None
        self._runs = [self.forced, *(reference.shaken(batch, forced_routing) if rounding == "shaken" else [])]
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


# Ties


def _ties(
    root: Path, candidate: Candidate, reference: Reference, batches: Sequence[Batch], config: BuildConfig
) -> tuple[bool | None, list[str]]:
    """Returns whether every tie goes to the earlier token, and the reasons if not. None if the candidate contains its
    weights, or if no router weights are declared.
    """
    silenced = list(zeroed_routers(reference.model, candidate.setting.bucket.seq))
    if candidate.weights is None or not silenced:
        return None, []
    # Position and length alone decide here which tokens are selected, so one full batch is enough.
    full = [batch for batch in batches if batch.kind == "random"][:1]
    chosen = full + [batch for batch in batches if batch.kind == "padded"]
    reasons: list[str] = []
    for zeros in silenced:
        expected = reference.remembered(
            f"{len(chosen)} of {candidate.setting.bucket.name}, seed {config.seed}, without {sorted(zeros)}",
            partial(_judged_without, reference, zeros, chosen),
        )
        with candidate.open(root, config, zeros) as runner:
            outputs = [runner.run(batch.read_by(runner.inputs)) for batch in chosen]
        reasons += ties_of_runs(outputs, chosen, expected)
    return not reasons, list(dict.fromkeys(reasons))


def zeroed_routers(model: Model, seq: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields float32 zeros for the weights of all routers that select any of `seq` tokens: idle routers are in no
    graph. If only some of these routers serve experts, also yields zeros for those alone, because zeros in the others
    may let no token reach the experts.
    """
    active = {site for site, k in (model.k_by_layer(seq) or {}).items() if k}
    deciding = {name: sites for name, sites in model.router_weights().items() if active.intersection(sites)}
    zeros = {name: np.zeros(tuple(model.weights[name].shape), np.float32) for name in deciding}
    experts = {name: array for name, array in zeros.items() if all(map(is_expert, deciding[name]))}
    if zeros:
        yield zeros
    if 0 < len(experts) < len(zeros):
        yield experts


def _judged_without(
    reference: Reference, zeros: Mapping[str, np.ndarray], batches: Sequence[Batch]
) -> list[Mapping[Site, Judged]]:
    """Returns the inputs of every selection in a model whose routers are zeros, for each batch."""
    silent = reference.with_weights(zeros)
    return [silent.free(batch).judged for batch in batches]


def ties_of_runs(
    outputs: Sequence[Mapping[str, np.ndarray]], batches: Sequence[Batch], judged: Sequence[Mapping[Site, Judged]]
) -> list[str]:
    """Returns reasons why runs with equal scores did not follow the rule for ties."""
    reasons = []
    for arrays, batch, expected in zip(outputs, batches, judged, strict=True):
        for site, selection in expected.items():
            index_BK = arrays.get(routed_output(site))
            wrong = 0 if index_BK is None else wrong_slots(index_BK, selection)
            if wrong:
                reasons.append(
                    f"{batch.kind}: layer {site} routing: {wrong} slots do not go to the earlier of tokens with equal "
                    "scores"
                )
    return list(dict.fromkeys(reasons))
