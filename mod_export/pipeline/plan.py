"""The plan of a build: its models, buckets, targets and variants, decided and checked before any work is done."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from mod_export.config import MOST_LOGITS_BYTES, BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines.protocol import EngineBuilder
from mod_export.errors import BuildFolderError, CheckpointError, ConfigError, TargetError, UsageError
from mod_export.folder.manifest import TOKENIZER
from mod_export.judge.text import TextFile, TextSource, TokensOf
from mod_export.measure.verdict import GIVE_A_BASELINE
from mod_export.model.model import GeneratingModel, Model, Origin, token_ids
from mod_export.model.tokenizer_files import TokenizerFiles
from mod_export.pipeline.roles import ROLES, WRITING, RoleStages
from mod_export.runtime.request import defaults_of
from mod_export.runtime.texts import Bytes
from mod_export.runtime.tokenizer import TokenizersFile
from mod_export.types import Availability, Bucket, DType, Graph, ModelKind, Unavailable, Variant

LIBRARIES_BYTES = 2**30
"""Memory of PyTorch, its exporter and ONNX Runtime."""
FLOAT32_BYTES = 4
LEAST_CACHE = 2
"""Tokens of the shortest text in which a step can be timed."""
LOGITS_AT_ONCE = 6
"""Number of logits arrays held at once: the reference in float32 and float64, the candidate, and their comparison."""
SMALL_ENGINE = 2**20
"""Bytes to expect of an engine that reads its weights from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The models in the form that decides about one token at a time, for texts of up to `window` tokens."""

    models: Mapping[ModelKind, GeneratingModel]
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a build will do.

    Attributes:
        model: the Mixture-of-Depths model.
        baseline: the dense model of --baseline; None if the dense baseline has the model's own weights, or if there is
            no dense baseline.
        models: the model and, if there is one, its dense baseline.
        buckets: shapes of the forward graphs, ascending.
        graphs: the portable graph of every model, role and bucket. Every stage loops over this table.
        targets: the targets to build, by name.
        availability: every known target, requested or not -> what this machine can do with it.
        generation: the models that write text, or the reason why there are none.
        tokenizer: the files of a tokenizer; for a model without one, the files that say where texts end or give a chat
            template, or None if it has no such files.
        text: the user's text that the model is judged and timed on; None if none was named.
    """

    model: Model
    baseline: Model | None
    models: Mapping[ModelKind, Model]
    config: BuildConfig
    buckets: tuple[Bucket, ...]
    graphs: tuple[Graph, ...]
    targets: Mapping[str, EngineBuilder]
    availability: Mapping[str, Availability]
    generation: GenerationPlan | Unavailable
    tokenizer: TokenizerFiles | None
    text: TextSource | None

    @property
    def vocabulary(self) -> str | None:
        """The file that says what ids represent: tokenizer.json, `bytes` for the bytes of UTF-8, or None."""
        if self.tokenizer is not None and self.tokenizer.has_vocabulary:
            return TOKENIZER
        return "bytes" if self.model.ids_of_text("") is not None else None

    @property
    def parameters(self) -> int:
        """Number of stored weights."""
        return self.model.parameters + (self.baseline.parameters if self.baseline else 0)

    def origin_of(self, kind: ModelKind) -> Origin:
        """Returns where a model comes from; a dense baseline of the model's own weights comes from its checkpoint."""
        return ((self.baseline if kind == "dense" else None) or self.model).origin

    def generating(self, kind: ModelKind) -> GeneratingModel:
        """Returns a model in the token-by-token form; only for plans that generate."""
        assert isinstance(self.generation, GenerationPlan)
        return self.generation.models[kind]

    def weights_path(self, kind: ModelKind, dtype: DType) -> str:
        """Returns the weights file of a model and dtype, relative to the build folder; models share one if they can."""
        prefix = "weights-baseline" if kind == "dense" and self.baseline is not None else "weights"
        return f"graphs/{prefix}-{dtype}.data"

    def engines(self) -> Iterator[tuple[EngineBuilder, Variant, Graph]]:
        """Yields every engine to build, with its portable graph."""
        for builder in self.targets.values():
            for graph in self.graphs:
                for variant in _variants(builder, graph, self.config):
                    yield builder, variant, graph


def generating_form(model: Model, kind: ModelKind, window: int, config: BuildConfig) -> GeneratingModel:
    """Returns a model in the token-by-token form. A dense baseline gets no slack: it has no slots to run out of.

    Raises:
        ValueError: it cannot generate, or not in this window.
    """
    return model.generating(window, config.generation.slack if kind == "mod" else 0)


def _variants(builder: EngineBuilder, graph: Graph, config: BuildConfig) -> Sequence[Variant]:
    if graph.writes_text and builder.name not in config.generation.targets:
        return []
    return builder.variants(config)


def make_plan(
    model: Model,
    baseline: Model | None,
    config: BuildConfig,
    root: Path,
    tokenizer: TokenizerFiles | None = None,
    text: TextFile | None = None,
) -> Plan:
    """Resolves buckets and targets, and refuses a build that cannot succeed.

    `tokenizer` is for models whose ids are not bytes. `text` is what the model is to be judged and timed on.

    Raises:
        ConfigError: a bucket is longer than the model, too large for the memory, or not supported by a target; or a
            speed-up is demanded and there is no dense baseline.
        CheckpointError: the baseline does not match the model.
        TargetError: a target is unknown or cannot build on this machine.
        BuildFolderError: there is not enough free space on the disk.
        UsageError: the model does not read text, or the text does not fit it.
    """
    if baseline is not None:
        _check_baseline(model, baseline)
    models: dict[ModelKind, Model] = {"mod": model}
    dense = model.dense() if baseline is None else baseline
    if dense is not None:
        models["dense"] = dense
    else:
        config = without_speed_gate(config)
    buckets = _buckets(model, config)
    availability = {name: engine.availability() for name, engine in ENGINES.items()}
    targets = _targets(config, availability)
    problems = _too_large(model, buckets)
    problems += [problem for engine in targets.values() for problem in engine.problems(config)]
    if config.outputs == "auto":
        large = max(_logits_bytes(model, bucket) for bucket in buckets) > MOST_LOGITS_BYTES
        config = config.model_copy(update={"outputs": "last" if large else "logits"})
    if config.outputs != "logits" and model.tokens is None:
        problems.append(f"outputs: {config.outputs}, but {model.name} is no model of token ids; leave `outputs` out")
    if tokenizer is not None:
        problems += _problems_of_tokenizer(tokenizer, model)
    generation: GenerationPlan | Unavailable = Unavailable("")
    try:
        generation = _generation(models, config, targets)
    except ConfigError as error:
        problems += error.problems
    plan = Plan(
        model=model,
        baseline=baseline,
        models=models,
        config=config,
        buckets=buckets,
        graphs=tuple(_graphs(config, models.keys(), buckets, generation)),
        targets=targets,
        availability=availability,
        generation=generation,
        tokenizer=tokenizer,
        text=None,
    )
    problems += _beyond_budget(plan)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    _check_room(plan, root)
    return plan if text is None else replace(plan, text=_source_of(text, plan))


def _source_of(text: TextFile, plan: Plan) -> TextSource:
    vocabulary, model = plan.vocabulary, plan.model
    window = plan.generation.window if isinstance(plan.generation, GenerationPlan) else 0
    vocab_size = None if model.tokens is None else model.tokens.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        if plan.tokenizer is not None and vocabulary == TOKENIZER:
            plan.tokenizer.write(Path(folder))
        return text.source(model.name, tokens_of(vocabulary, Path(folder)), vocab_size, plan.buckets, window)


def tokens_of(vocabulary: str | None, folder: Path) -> TokensOf | None:
    """Returns the tokenizer of a model without special tokens; None if ids stand for no text.

    Args:
        vocabulary: a file of `folder`, `bytes`, or None, as in a manifest.
        folder: where the file is.

    Raises:
        UsageError: the file cannot be read, or the package `tokenizers` is not installed.
    """
    if vocabulary is None:
        return None
    return partial((Bytes() if vocabulary == "bytes" else TokenizersFile(folder / vocabulary)).ids, special=False)


def _buckets(model: Model, config: BuildConfig) -> tuple[Bucket, ...]:
    """Returns the shapes of whole rows: those that the configuration names, or those that the model was captured at.

    Raises:
        ConfigError: the model cannot have one of these shapes.
    """
    if model.tokens is not None:
        return config.bucket_list(model.tokens.max_positions)
    captured = tuple(model.buckets)
    requested = tuple(sorted({Bucket(*pair) for pair in config.buckets})) or captured
    if missing := [bucket.name for bucket in requested if bucket not in captured]:
        known = ", ".join(bucket.name for bucket in captured)
        raise ConfigError([f"buckets: {', '.join(missing)}: {model.name} was captured at {known}; capture it at each"])
    return requested


def _problems_of_tokenizer(tokenizer: TokenizerFiles, model: Model) -> list[str]:
    path = tokenizer.path
    if model.tokens is None:
        problem = f"{path}: {model.name} is not known to read token ids, so it takes no tokenizer; leave it out"
        return [problem] if tokenizer.has_vocabulary else []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_path = tokenizer.write(Path(folder))
        try:
            defaults_of(Path(folder), None)  # A file that serving would refuse is refused here.
        except UsageError as error:
            raise UsageError(str(error).replace(folder, str(path))) from error
        if not tokenizer.has_vocabulary:
            return []
        file = TokenizersFile(tokenizer_path)
    # Fine-tuned models often have a padding token that was added later and has no weights. A prompt that contains it is
    # refused.
    if file.base_size <= model.tokens.vocab_size:
        return []
    return [f"{path}: has ids up to {file.base_size - 1}, and the model {model.tokens.vocab_size} ids; name its own"]


def without_speed_gate(config: BuildConfig) -> BuildConfig:
    """Returns the configuration without a gate on speed, for a build that has no dense baseline to be faster than.

    Raises:
        ConfigError: the user's configuration demands a speed-up. The gate of default.toml does not count as a demand.
    """
    demanded = config.latency.min_speedup
    if demanded > 0 and "min_speedup" in config.latency.model_fields_set:
        raise ConfigError(
            [
                f"latency.min_speedup: a speed-up of {demanded:g} is demanded, and there is no dense baseline that it "
                f"could be shown over; {GIVE_A_BASELINE}, or set min_speedup = 0"
            ]
        )
    return config.model_copy(update={"latency": config.latency.model_copy(update={"min_speedup": 0.0})})


def check_names(targets: Sequence[str]) -> None:
    """Refuses unknown targets.

    Raises:
        TargetError: a target is not in ENGINES.
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
    wanted = config.targets or tuple(name for name, status in availability.items() if status.builds)
    if not wanted:
        reasons = "; ".join(f"{name}: {status.reason}" for name, status in availability.items())
        raise TargetError(f"no target can build on this machine: {reasons}")
    return {name: ENGINES[name] for name in ENGINES if name in wanted}


def _why_not_generating(models: Mapping[ModelKind, Model]) -> str | None:
    for kind, model in models.items():
        reason = model.why_not_generating()
        if reason is not None:
            return reason if kind == "mod" else f"its dense baseline cannot: {reason}"
    return None


def _generation(
    models: Mapping[ModelKind, Model], config: BuildConfig, targets: Mapping[str, EngineBuilder]
) -> GenerationPlan | Unavailable:
    """Returns the models that write text, or the reason why there are none.

    Raises:
        ConfigError: the model must generate (`generation.build = "always"`) and cannot, or not in this window.
    """
    options = config.generation
    if options.build == "never":
        return Unavailable("it was built with generation.build = never; build it again with auto")
    reason = _why_not_generating(models)
    if reason is None and targets.keys().isdisjoint(options.targets):
        reason = f"it was built for {', '.join(targets)}, and generation.targets are {', '.join(options.targets)}"
    if reason is not None:
        if options.build == "always":
            raise ConfigError([f"generation.build: always, but this model cannot generate token by token: {reason}"])
        return Unavailable(reason)
    window = options.window_of(token_ids(models["mod"]).max_positions)
    problems = [
        f"generation.{name}: {length} is longer than the window of {window}; shorten it, or give a longer window"
        for name, lengths in (("prompts", options.prompts), ("caches", options.caches))
        for length in lengths
        if length > window
    ]
    problems += [
        f"generation.{'caches' if options.caches else 'window'}: {length} is too short, because a step writes the "
        f'token after another one; give at least {LEAST_CACHE}, or generation.build = "never"'
        for length in options.cache_lengths(window)
        if length < LEAST_CACHE
    ]
    if problems:
        raise ConfigError(problems)
    try:
        writing = {kind: generating_form(model, kind, window, config) for kind, model in models.items()}
    except ValueError as error:
        raise ConfigError([f"generation: {error}"]) from error
    return GenerationPlan(models=writing, window=window)


def _graphs(
    config: BuildConfig,
    kinds: Collection[ModelKind],
    buckets: Sequence[Bucket],
    generation: GenerationPlan | Unavailable,
) -> Iterator[Graph]:
    """Yields the portable graphs of a build: forward graphs of every model, then those that write text."""
    for bucket in buckets:
        for kind in kinds:
            yield _portable(kind, ROLES["forward"], bucket, config)
    if isinstance(generation, Unavailable):
        return
    for kind in kinds:
        for stages in WRITING:
            for bucket in stages.buckets(config.generation, generation.window):
                yield _portable(kind, stages, bucket, config)


def _portable(kind: ModelKind, stages: RoleStages, bucket: Bucket, config: BuildConfig) -> Graph:
    outputs = stages.outputs(config)
    graph = Graph(path="", model=kind, role=stages.role, bucket=bucket, dtype="float32", target=None, outputs=outputs)
    return replace(graph, path=f"graphs/{graph.stem}.onnx")


def _too_large(model: Model, buckets: Sequence[Bucket]) -> list[str]:
    """Names the buckets whose logits do not fit into memory. Every bucket runs at least once, during capture."""
    memory = psutil.virtual_memory().total
    needed = {bucket: _logits_bytes(model, bucket) for bucket in buckets}
    return [
        f"buckets: {bucket.batch} x {bucket.seq} has {size / 2**30:,.0f} GiB of logits, this machine has "
        f"{memory / 2**30:,.0f} GiB of memory; lower the batch or the length"
        for bucket, size in needed.items()
        if size > memory
    ]


def _logits_bytes(model: Model, bucket: Bucket) -> int:
    """Size of the logits of a model of token ids; 0 for other models, which ran at their shapes during capture."""
    vocab_size = 0 if model.tokens is None else model.tokens.vocab_size
    return FLOAT32_BYTES * bucket.batch * bucket.seq * vocab_size


def _beyond_budget(plan: Plan) -> list[str]:
    """Returns a problem if the build needs more memory than `max_memory`.

    A build needs room for the libraries, the reference, an engine's packed weights, and the logits of both. The graph
    stages hold no weights. Benchmarks load two engines that share their weights; validation loads one engine.
    """
    weights = FLOAT32_BYTES * plan.parameters
    logits = max(_logits_bytes(plan.model, bucket) for bucket in plan.buckets)
    needed = LIBRARIES_BYTES + 2 * weights + LOGITS_AT_ONCE * logits
    budget = plan.config.max_memory
    if not budget or needed <= budget:
        return []
    return [
        f"max_memory: this build needs about {needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB are allowed; allow "
        "more, or build shorter buckets or a smaller batch"
    ]


def _check_baseline(model: Model, baseline: Model) -> None:
    if baseline.routes_depth:
        raise CheckpointError(f"baseline {baseline.name}: has routed layers; a baseline is a dense model")
    ours, theirs = _job_of(model), _job_of(baseline)
    problems = [
        f"{what} {theirs.get(what)} instead of {value}" for what, value in ours.items() if theirs.get(what) != value
    ]
    if problems:
        raise CheckpointError(f"baseline {baseline.name}: has {' and '.join(problems)}, so it does not do the same job")


def _job_of(model: Model) -> dict[str, str]:
    """Returns what a baseline must have in common with the model, as name -> value."""
    if model.tokens is not None:
        return {"a vocabulary of": str(model.tokens.vocab_size), "positions up to": str(model.tokens.max_positions)}
    inputs = {
        f"at {bucket.name} the inputs": ", ".join(
            f"{name} {array.dtype} {list(array.shape)}" for name, array in model.sample(bucket, 0).items()
        )
        for bucket in model.buckets
    }
    return {**inputs, "the outputs": ", ".join(model.output_names())}


def _check_room(plan: Plan, root: Path) -> None:
    """Refuses a build for which the disk has no room, before minutes are spent on it.

    Each dtype has a weights file, and some engines contain a copy of the weights.
    """
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 4}
    dtypes = {"float32", *(variant.dtype for _, variant, _ in plan.engines())}
    needed = sum(sizes[dtype] for dtype in dtypes) * plan.parameters
    for builder, variant, _ in plan.engines():
        needed += sizes[variant.dtype] * plan.model.parameters if builder.embeds_weights else SMALL_ENGINE
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    # A build that goes on, or is repeated, has a part of its files already.
    kept = sum(file.stat().st_size for file in root.glob("graphs/*.data"))
    kept += sum(max(file.stat().st_size, SMALL_ENGINE) for file in root.glob("engines/*/*") if file.is_file())
    if free + kept < needed:
        raise BuildFolderError(
            f"{root}: needs about {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free; "
            "free some space, name another folder with -o, or build for fewer targets"
        )
