"""The plan of a build: which models, buckets, targets and variants, decided and checked before any work is done."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mod_export.artifacts import Availability, Bucket, ModelKind, Variant
from mod_export.config import BuildConfig
from mod_export.engine import ENGINES
from mod_export.errors import BuildFolderError, CheckpointError, ConfigError, TargetError
from mod_export.generation.texts import TokenizersFile
from mod_export.model import Model
from mod_export.protocols import EngineBuilder, GeneratingModel, LoadedModel

__all__ = ["KINDS", "GenerationPlan", "Plan", "check_names", "make_plan"]

LIBRARIES_BYTES = 2**30
"""PyTorch, its exporter and ONNX Runtime with what they keep."""
FLOAT32_BYTES = 4
LOGITS_AT_ONCE = 6
"""Of the reference in float32 and float64, the candidate, and what they are compared in."""
KINDS: tuple[ModelKind, ...] = ("mod", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What writes text token by token.

    Attributes:
        models: the model and what it is compared with, as they decide about one token at a time.
        window: the longest text in tokens.
        prefills: buckets of prompts, ascending.
        decodes: buckets of steps, ascending; `seq` is the tokens that a text can have.
        targets: what engines are built for, by name.
    """

    models: Mapping[ModelKind, GeneratingModel]
    window: int
    prefills: tuple[Bucket, ...]
    decodes: tuple[Bucket, ...]
    targets: Mapping[str, EngineBuilder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a build will do.

    Attributes:
        model: the Mixture-of-Depths model.
        baseline: the dense model given with --baseline, None for the dense twin.
        config: the resolved configuration.
        buckets: ascending.
        targets: what is built, by name.
        availability: of every known target, built or not.
        generation: what writes text; or the reason why nothing does.
        tokenizer: `bytes`, a file of the package `tokenizers`, or None where ids stand for no text.
    """

    model: Model
    baseline: Model | None
    config: BuildConfig
    buckets: tuple[Bucket, ...]
    targets: Mapping[str, EngineBuilder]
    availability: Mapping[str, Availability]
    generation: GenerationPlan | str
    tokenizer: Path | str | None

    def loaded(self, kind: ModelKind) -> LoadedModel:
        """The model, or what it is compared with."""
        if kind == "dense" and self.baseline is not None:
            return self.baseline.loaded
        return self.model.of_kind(kind)

    def weights_of(self, kind: ModelKind) -> str:
        """Prefix of the weights files of a kind; the dense twin uses the model's own."""
        return "weights-baseline" if kind == "dense" and self.baseline is not None else "weights"

    def cells(self) -> Iterator[tuple[ModelKind, Bucket]]:
        """Every (model, bucket)."""
        for bucket in self.buckets:
            for kind in KINDS:
                yield kind, bucket

    def variants(self) -> Iterator[tuple[EngineBuilder, Variant, ModelKind, Bucket]]:
        """Every engine to build."""
        for builder in self.targets.values():
            for kind, bucket in self.cells():
                for variant in builder.variants(self.config):
                    yield builder, variant, kind, bucket


def make_plan(
    model: Model, baseline: Model | None, config: BuildConfig, root: Path, tokenizer: Path | None = None
) -> Plan:
    """Resolves buckets and targets, and refuses what cannot work.

    `tokenizer` is a file of the package `tokenizers`, for models whose ids are not bytes.

    Raises:
        ConfigError: buckets longer than the model or larger than the memory, or that a target cannot take.
        CheckpointError: a baseline that does not match.
        TargetError: an unknown target, or one that cannot build on this machine.
        BuildFolderError: the disk has no room for the result.
    """
    if not model.loaded.routes_depth and baseline is None:
        # The dense twin of a model in which nobody passes a block by is the model itself: there is no gain to ask for.
        config = config.model_copy(update={"latency": config.latency.model_copy(update={"min_speedup": 0.0})})
    if baseline is not None:
        _check_baseline(model, baseline)
    buckets = config.bucket_list(model.loaded.max_positions)
    availability = {name: engine.availability() for name, engine in ENGINES.items()}
    targets = _targets(config, availability)
    problems = _too_large(model, buckets)
    problems += [
        f"target {name}, bucket {bucket.name}: {problem}"
        for name, engine in targets.items()
        for bucket in buckets
        for kind in KINDS
        for problem in engine.check(config, kind, bucket)
    ]
    if tokenizer is not None and (size := TokenizersFile(tokenizer).size) > model.loaded.vocab_size:
        problems.append(
            f"{tokenizer}: has ids up to {size - 1}, and the model {model.loaded.vocab_size} ids; name its own"
        )
    generation: GenerationPlan | str = ""
    try:
        generation = _generation(model, baseline, config, targets)
    except ConfigError as error:
        problems += error.problems
    plan = Plan(
        model=model,
        baseline=baseline,
        config=config,
        buckets=buckets,
        targets=targets,
        availability=availability,
        generation=generation,
        tokenizer=tokenizer or ("bytes" if model.loaded.ids_of_text("") is not None else None),
    )
    problems += _beyond_budget(plan)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    _check_room(plan, root)
    return plan


def check_names(targets: Sequence[str]) -> None:
    """Every target is one of ENGINES.

    Raises:
        TargetError: one is not.
    """
    for name in targets:
        if name not in ENGINES:
            near = difflib.get_close_matches(name, ENGINES, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise TargetError(f"unknown target {name!r}{hint}; known: {', '.join(ENGINES)}")


def _targets(config: BuildConfig, availability: Mapping[str, Availability]) -> dict[str, EngineBuilder]:
    check_names(config.targets)
    refused = [f"{name}: {availability[name].reason}" for name in config.targets if not availability[name].builds]
    if refused:
        raise TargetError("cannot build here for " + "; ".join(refused))
    wanted = config.targets or tuple(name for name, found in availability.items() if found.builds)
    if not wanted:
        reasons = "; ".join(f"{name}: {found.reason}" for name, found in availability.items())
        raise TargetError(f"no target can build on this machine: {reasons}")
    return {name: ENGINES[name] for name in ENGINES if name in wanted}


def _generation(
    model: Model, baseline: Model | None, config: BuildConfig, targets: Mapping[str, EngineBuilder]
) -> GenerationPlan | str:
    """What writes text, or why nothing does.

    Raises:
        ConfigError: the model cannot generate though it should, or not in this window.
    """
    options = config.generation
    if options.build == "never":
        return "it was built with generation.build = never; build it again with auto"
    reason = model.loaded.why_not_generating()
    wanted: dict[str, EngineBuilder] = {name: one for name, one in targets.items() if name in set(options.targets)}
    if reason is None and not wanted:
        reason = f"it was built for {', '.join(targets)}, and generation.targets are {', '.join(options.targets)}"
    if reason is not None:
        if options.build == "always":
            raise ConfigError([f"generation.build: always, but this model cannot generate token by token: {reason}"])
        return reason
    window = options.window_of(model.loaded.max_positions)
    problems = [
        f"generation.{name}: {length} is longer than the window of {window}; shorten it, or give a longer window"
        for name, lengths in (("prompts", options.prompts), ("caches", options.caches))
        for length in lengths
        if length > window
    ]
    if problems:
        raise ConfigError(problems)
    try:
        models: dict[ModelKind, GeneratingModel] = {
            "mod": model.loaded.generating(window, options.slack),
            "dense": (baseline.loaded if baseline else model.of_kind("dense")).generating(window),
        }
    except ValueError as error:
        raise ConfigError([f"generation: {error}"]) from error
    return GenerationPlan(
        models=models,
        window=window,
        prefills=tuple(Bucket(1, length) for length in options.prompt_lengths(window)),
        decodes=tuple(sorted(Bucket(b, c) for b in options.batches for c in options.cache_lengths(window))),
        targets=wanted,
    )


def _too_large(model: Model, buckets: Sequence[Bucket]) -> list[str]:
    """Every stage runs a bucket at least once, be it only to see that the model is one graph."""
    memory = psutil.virtual_memory().total
    needed = {bucket: 4 * bucket.batch * bucket.seq * model.loaded.vocab_size for bucket in buckets}
    return [
        f"buckets: {bucket.batch} x {bucket.seq} has {size / 2**30:,.0f} GiB of logits, this machine has "
        f"{memory / 2**30:,.0f} GiB of memory; lower the batch or the length"
        for bucket, size in needed.items()
        if size > memory
    ]


def _beyond_budget(plan: Plan) -> list[str]:
    """What a build cannot do without: libraries, the reference, an engine's packed weights, and logits of both.

    The graph stages take no memory for weights. Measuring loads two engines, which share theirs, and validation one.
    """
    weights = FLOAT32_BYTES * (plan.model.parameters + (plan.baseline.parameters if plan.baseline else 0))
    logits = max(FLOAT32_BYTES * bucket.batch * bucket.seq * plan.model.loaded.vocab_size for bucket in plan.buckets)
    needed = LIBRARIES_BYTES + 2 * weights + LOGITS_AT_ONCE * logits
    budget = plan.config.max_memory
    if not budget or needed <= budget:
        return []
    return [
        f"max_memory: this build needs about {needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB are allowed; allow "
        "more, or build shorter buckets or a smaller batch"
    ]


def _check_baseline(model: Model, baseline: Model) -> None:
    if baseline.loaded.routes_depth:
        raise CheckpointError(f"baseline {baseline.name}: has routed layers; a baseline is a dense model")
    problems = [
        f"{what} {theirs} instead of {ours}"
        for what, ours, theirs in (
            ("a vocabulary of", model.loaded.vocab_size, baseline.loaded.vocab_size),
            ("positions up to", model.loaded.max_positions, baseline.loaded.max_positions),
        )
        if ours != theirs
    ]
    if problems:
        raise CheckpointError(f"baseline {baseline.name}: has {' and '.join(problems)}, so it does not do the same job")


def _check_room(plan: Plan, root: Path) -> None:
    """A full disk is found now and not after minutes: weights per dtype, and plans that embed a copy of them."""
    parameters = plan.model.parameters + (plan.baseline.parameters if plan.baseline else 0)
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 4}
    dtypes = {"float32", *(variant.dtype for _, variant, _, _ in plan.variants())}
    needed = sum(sizes[dtype] for dtype in dtypes) * parameters
    for builder, variant, _, _ in plan.variants():
        needed += sizes[variant.dtype] * plan.model.parameters if builder.suffix == ".engine" else 2**20
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise BuildFolderError(
            f"{root}: needs about {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free; "
            "free some space, name another folder with -o, or build for fewer targets"
        )
