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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mod_export.config import BuildConfig, ParityGate
from mod_export.engines.protocol import Runner
from mod_export.errors import BuildError, BuildFolderError, GraphError, TargetError
from mod_export.judge.candidates import Candidate
from mod_export.judge.checks import MADE_OF_TIES, REFERENCE, Comparison, failed_row, fails_anyway, judge, unjudged_row
from mod_export.judge.compare import Judged, rows_of, wrong_slots
from mod_export.judge.compare_runner import ComparedInput, compare_runner, slack_of, undefined_in
from mod_export.judge.inputs import Batch, batches_of, one_of_each_kind
from mod_export.judge.locate import (
    first_faulty_layer,
    locate_against_reference,
    locate_in_graph,
    origin_in_graph,
    origin_in_reference,
)
from mod_export.judge.reference import Reference
from mod_export.judge.text import TextSource
from mod_export.model.model import Model
from mod_export.rows.correctness import LeftOutRows, Located, ParityRow
from mod_export.types import QUANTIZED, Graph, Setting, Site, is_expert, routed_output

MOST_REASONS = 4
"""Number of reasons listed beside the place of the fault; further reasons are only counted."""
MOST_TIMES = 100.0
"""A candidate that exceeds so many times its allowance is not measured further."""
Fresh = Callable[[Graph], bytes]
"""Returns the bytes of a fresh export of a graph."""


def parity_of(
    root: Path,
    candidate: Candidate,
    reference: Reference,
    config: BuildConfig,
    fresh: Fresh,
    text_source: TextSource | None = None,
) -> ParityRow:
    """Judges a candidate on inputs of every kind. A candidate that cannot be loaded or run fails with the
    reason. A float engine of a model without held-out text is judged on text only if the user named one: text finds
    no faults there that other inputs miss. Integer weights are always judged on text.
    """
    needs_text = candidate.setting.dtype in QUANTIZED or (text_source is not None and text_source.kind == "named")
    batches = batches_of(reference, candidate.setting.bucket, config, text_source if needs_text else None)
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
    except GraphError as error:
        row = failed_row(f"cannot be run: {error}", gate, candidate.setting, candidate.path)
    except (BuildError, TargetError) as error:
        row = unjudged_row(f"cannot be run: {error}", gate, candidate.setting, candidate.path)
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
    nan = None
    if candidate.source is not None and row.inputs and any(math.isnan(error.max_abs) for error in row.errors):
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
    depends on rounding, rounding is measured in several runs on one input after the other, until it passes, or until
    the other inputs cannot help.

    Raises:
        EngineError: the candidate cannot be run on these inputs.
    """
    slack = slack_of(gate, setting.dtype)
    inputs = [one for runner, batches in parts for one in compare_runner(runner, reference, batches, slack)]
    compared = _all_of(inputs)
    row = judge(compared, gate, setting, artifact)
    # Where the error is largest, rounding is likely to be.
    for n in sorted(range(len(inputs)), key=lambda n: inputs[n].largest_error, reverse=True):
        if row.passed or is_hopeless(inputs, gate, setting):
            break
        inputs[n] = inputs[n].measured_in_several_runs()
        compared = _all_of(inputs)
        row = judge(compared, gate, setting, artifact)
    return row


def is_hopeless(inputs: Sequence[ComparedInput], gate: ParityGate, setting: Setting) -> bool:
    """Whether a candidate that fails will fail however rounding is measured on further inputs."""
    compared = _all_of(inputs)
    if fails_anyway(compared, gate, setting):
        return True
    # One run can be exact by luck, so only several bound the error on other inputs. An input whose values are much
    # larger may have a much larger error, so those that were measured must be among those that fail.
    measured = _all_of([one for one in inputs if one.measured == "several"])
    return all(fails_anyway(part, gate, setting, MOST_TIMES) for part in (measured, compared))


def _all_of(inputs: Sequence[ComparedInput]) -> list[Comparison]:
    return [comparison for one in inputs for comparison in one.comparisons]


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
