"""Everything that is found out about one candidate: parity, ties, where it fails, and whether it is causal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines.protocol import Runner
from mod_export.errors import BuildError, BuildFolderError, TargetError
from mod_export.results.parity import Located, ParityRow
from mod_export.results.structure import CausalityRow
from mod_export.types import PRIMARY, Bucket
from mod_export.validate.candidates import Candidate
from mod_export.validate.causality import LAST, probe_causality, unprobed
from mod_export.validate.fresh import FreshGraphs
from mod_export.validate.inputs import Batch, one_of_each_kind, parity_batches
from mod_export.validate.locate import locate_by_depth, locate_in_graph
from mod_export.validate.near_ties import near_tie_batches
from mod_export.validate.reference import Reference
from mod_export.validate.rows import failed_row, judge_runner
from mod_export.validate.ties import judged_without_routers, ties_of_runs, zeroed_experts, zeroed_routers

__all__ = ["batches_of", "causality_of", "parity_of"]


def batches_of(reference: Reference, bucket: Bucket, config: BuildConfig) -> list[Batch]:
    """The inputs of a bucket."""
    parity = config.parity
    batches = parity_batches(reference.loaded, bucket, config.seed, parity.batches_per_kind, parity.text_batches)
    return batches + reference.remembered(
        f"near-ties of {bucket.name}, seed {config.seed}", lambda: near_tie_batches(reference, bucket, config.seed)
    )


def parity_of(root: Path, candidate: Candidate, reference: Reference, config: BuildConfig) -> ParityRow:
    """Judges a candidate on inputs of every kind. What cannot be loaded or run has failed, with the reason."""
    batches = batches_of(reference, candidate.setting.bucket, config)
    if candidate.engine_judged:
        batches = one_of_each_kind(batches)
    gate = config.parity.gate(candidate.setting.dtype)
    try:
        with candidate.open(root, config) as runner:
            row = judge_runner(runner, reference, batches, gate, candidate.setting, candidate.path)
        exact, reasons = _ties(root, candidate, reference, batches, config)
    except (BuildError, TargetError) as error:
        row = failed_row(f"cannot be run: {error}", gate, candidate.setting, candidate.path)
        return _with_place(row, root, candidate, reference, batches, config)
    reasons = [*row.reasons, *reasons]
    row = row.model_copy(update={"ties_exact": exact, "reasons": tuple(reasons), "passed": not reasons})
    failing = _failing_first(batches, row.reasons)
    return row if row.passed else _with_place(row, root, candidate, reference, failing, config)


def _ties(
    root: Path, candidate: Candidate, reference: Reference, batches: Sequence[Batch], config: BuildConfig
) -> tuple[bool | None, list[str]]:
    """Whether every tie goes to the earlier token; None where the candidate holds its own weights or routes nothing."""
    zeros = zeroed_routers(reference.loaded, candidate.setting.bucket.seq)
    if candidate.weights is None or not zeros:
        return None, []
    # Position and length alone decide here which tokens are selected, so one full batch says as much as many.
    full = [batch for batch in batches if batch.kind == "random"][:1]
    chosen = full + [batch for batch in batches if batch.kind == "padded"]
    reasons: list[str] = []
    for silenced in filter(None, (zeros, zeroed_experts(reference.loaded, zeros))):
        expected = reference.remembered(
            f"{len(chosen)} of {candidate.setting.bucket.name}, seed {config.seed}, without {sorted(silenced)}",
            partial(judged_without_routers, reference, silenced, chosen),
        )
        with candidate.open(root, config, silenced) as runner:
            outputs = [runner.run(_feeds(runner, batch)) for batch in chosen]
        reasons += ties_of_runs(outputs, chosen, expected)
    return not reasons, list(dict.fromkeys(reasons))


def _with_place(
    row: ParityRow,
    root: Path,
    candidate: Candidate,
    reference: Reference,
    batches: Sequence[Batch],
    config: BuildConfig,
) -> ParityRow:
    """Adds where the candidate parts from what it should be, as far as it can be found out."""
    try:
        found = _place(root, candidate, reference, batches, config)
    except (BuildError, BuildFolderError, TargetError) as error:
        reason = f"the place of the fault was not found: {str(error).splitlines()[0]}"
        return row.model_copy(update={"reasons": (*row.reasons, reason)})
    if found is None:
        return row
    return row.model_copy(update={"located": found, "reasons": (*row.reasons, str(found))})


def _place(
    root: Path, candidate: Candidate, reference: Reference, batches: Sequence[Batch], config: BuildConfig
) -> Located | None:
    if candidate.graph is not None and candidate.weights is not None:
        fresh = FreshGraphs(root).graph(candidate.graph, candidate.weights, reference)
        return locate_in_graph(root, candidate.path, fresh, batches)
    if candidate.engine is not None:
        return locate_by_depth(root, candidate.engine, reference, batches, config)
    return None


def _failing_first(batches: Sequence[Batch], reasons: Sequence[str]) -> list[Batch]:
    """Inputs on which something was seen come first: the place is looked for where the fault shows."""
    kinds = {reason.partition(":")[0] for reason in reasons}
    return sorted(batches, key=lambda batch: batch.kind not in kinds)


def causality_of(
    root: Path, candidate: Candidate, reference: Reference, config: BuildConfig, tolerance: float
) -> CausalityRow:
    """Asks a candidate whether its logits depend on what comes later.

    Args:
        root: the build folder.
        candidate: which one.
        reference: of its model.
        config: of the build.
        tolerance: the largest error of a logit that its parity allows.

    Raises:
        BuildError: it cannot be run.
    """
    batch = parity_batches(reference.loaded, candidate.setting.bucket, config.seed, 1)[0]
    if reference.outputs == "last":
        return unprobed(LAST, candidate.setting)
    name = PRIMARY[reference.outputs]
    with candidate.open(root, config) as runner:
        if name not in runner.outputs:
            return unprobed(f"the engine gives no {name}", candidate.setting)
        return probe_causality(
            runner,
            reference,
            batch,
            candidate.setting,
            vocab_size=reference.loaded.vocab_size,
            suffixes=config.parity.suffixes,
            tolerance=tolerance,
            seed=config.seed,
        )


def _feeds(runner: Runner, batch: Batch) -> dict[str, np.ndarray]:
    return {name: array for name, array in batch.feeds.items() if name in runner.inputs}
