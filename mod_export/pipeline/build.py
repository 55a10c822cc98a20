"""One run over one build folder: what its stages share.

`Build.start` makes a build of a plan: stages fill it with graphs and engines, and the folder records every step.
`Build.open` makes one of a finished folder, for `validate` and `bench`: graphs and engines come from the manifest, and
nothing is recorded. The stages are the same.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines.protocol import EngineBuilder, Runner
from mod_export.environment import describe_machine, versions
from mod_export.errors import BuildError, UsageError
from mod_export.folder.manifest import TOKENIZER, GenerationFacts, ModelFacts
from mod_export.folder.programs import first_sample
from mod_export.folder.workspace import FinishedFolder, Make, Step, Workspace
from mod_export.judge.reference import KeptRuns, Reference, tensors_of
from mod_export.judge.text import TextFile, TextSource, documentation_of, prompts_of, text_kind
from mod_export.measure.conditions import Watch
from mod_export.measure.decode import step_bytes
from mod_export.measure.roofline import cached_roofline
from mod_export.model.model import GeneratingModel, GraphSource, Model, tokens_sample
from mod_export.pipeline.plan import GenerationPlan, Plan, generating_form, tokens_of
from mod_export.pipeline.restore import as_built, restored_model
from mod_export.pipeline.roles import ROLES
from mod_export.rows.base import ABOUT, FailedRow, Result, fields_of_graph, reason_for, sentences
from mod_export.rows.cost import Roofline, Work
from mod_export.rows.speed import NamedText
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.runtime.deployment import runnable_engines
from mod_export.types import (
    Availability,
    Bucket,
    DType,
    Engine,
    Graph,
    ModelKind,
    Role,
    TextKind,
    Unavailable,
    Variant,
    graph_of,
    having,
    weights_dtypes,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mod_export.judge.candidates import Candidate

MOST_NOTES = 4
"""Largest number of further reasons named where nothing could be built."""
Row = TypeVar("Row", bound=Result)


class HasModel(Protocol):
    """A graph or an engine."""

    @property
    def model(self) -> ModelKind: ...


class Build:
    """One run of stages over one folder. A stage reads what earlier stages left here and adds its own results.

    Models, references and sources of graphs are made when a stage first asks for them: a build that reuses every step
    needs none of them, and neither does a benchmark on a server without PyTorch.

    Attributes:
        config: the resolved configuration.
        facts: the model and, if there is one, its dense baseline, as the manifest describes them.
        generation: what writing text needs, or the reason why the folder cannot write text.
        buckets: shapes of whole rows, ascending.
        targets: the targets that this run is limited to; empty for all.
        graphs: every ONNX graph of every role, portable ones and those of targets.
        engines: every engine of every role.
        weight_digests: weights file -> tensor -> SHA-256 of the checkpoint's tensor.
        work: path of an engine -> operations of its graph.
        steps: the steps of this run, in order.
        failed: what this run could not do, in order; the rest went on.
        missing: what the build of a finished folder could not do.
        not_run: path of a graph that could be judged in place of an engine, and was not -> a sentence that says why.
        finished: the finished folder that this run looks at; None where the folder is being built.
        checkpoint: the checkpoint that a finished folder is compared with; None for the folder's own weights.
    """

    def __init__(
        self,
        store: Workspace | FinishedFolder,
        config: BuildConfig,
        model: Callable[[ModelKind], Model],
        generating: Callable[[ModelKind], GeneratingModel],
        facts: Mapping[ModelKind, ModelFacts],
        generation: GenerationFacts | Unavailable,
        buckets: Sequence[Bucket],
    ) -> None:
        """Takes the values in which `start` and `open` differ. Call one of these two instead."""
        self.config, self.facts, self.generation = config, facts, generation
        self.buckets = tuple(buckets)
        self.model: Callable[[ModelKind], Model] = cache(model)
        """Returns the model in the form that reads whole rows."""
        self.generating: Callable[[ModelKind], GeneratingModel] = cache(generating)
        """Returns the model in the form that decides about one token at a time."""
        self.targets: tuple[str, ...] = ()
        self.graphs: list[Graph] = []
        self.engines: list[Engine] = []
        self.weight_digests: dict[str, dict[str, str]] = {}
        self.work: dict[str, tuple[Work, ...]] = {}
        self.steps: list[Step] = []
        self.failed: list[FailedRow] = []
        self.missing: tuple[FailedRow, ...] = ()
        self.not_run: dict[str, str] = {}
        self.finished: FinishedFolder | None = store if isinstance(store, FinishedFolder) else None
        self.checkpoint: Path | None = None
        self.kept_runs = KeptRuns()
        """Runs of the reference, which all references share."""
        self._store = store
        self._plan: Plan | None = None
        self._named_text: TextSource | None = None
        self._announce: Callable[[str], None] = lambda name: None
        self._errors: list[BuildError] = []
        self._rooflines: dict[DType, Roofline | None] = {}
        self._rows: list[Result] = []
        self._availability: dict[str, Availability] = {}
        self._references: dict[tuple[ModelKind, Role], Reference] = {}
        self._sources: dict[tuple[ModelKind, Role, Bucket], GraphSource] = {}

    @classmethod
    def start(cls, plan: Plan, workspace: Workspace, announce: Callable[[str], None]) -> Self:
        """Returns a build of a plan, whose steps are recorded in the folder and announced before they start."""
        build = cls(
            workspace,
            plan.config,
            plan.models.__getitem__,
            plan.generating,
            {kind: _facts(plan, kind) for kind in plan.models},
            plan.generation if isinstance(plan.generation, Unavailable) else _generation_facts(plan),
            plan.buckets,
        )
        build._plan, build._announce, build._named_text = plan, announce, plan.text
        return build

    @classmethod
    def open(
        cls,
        root: Path,
        config: BuildConfig | None,
        targets: Sequence[str],
        checkpoint: Path | None = None,
        text: Path | None = None,
        *,
        verify: bool,
    ) -> Self:
        """Returns a build over a finished folder, whose models are restored from its own spec and weights.

        Args:
            root: the folder.
            config: replaces the folder's own configuration, except for what its graphs were made for.
            targets: names of the targets to run; empty for all.
            checkpoint: weights that take the place of the folder's own.
            text: a file of text to judge and to time on.
            verify: whether every file is compared with its hash.

        Raises:
            BuildFolderError: not a whole build folder, or, with `verify`, a file that is not what was built.
            TargetError: nothing to run.
            UsageError: the text cannot be read, or does not fit.
        """
        file = None if text is None else TextFile.read(text)
        folder = FinishedFolder(root, verify=verify)
        manifest = folder.manifest
        config = as_built(config, manifest.config)

        def generating(kind: ModelKind) -> GeneratingModel:
            assert isinstance(manifest.generation, GenerationFacts)
            return generating_form(build.model(kind), kind, manifest.generation.window, config)

        build = cls(
            folder,
            config,
            lambda kind: restored_model(folder, kind, checkpoint),
            generating,
            manifest.models,
            manifest.generation,
            manifest.buckets,
        )
        build.targets, build.checkpoint = tuple(targets), checkpoint
        build.graphs += manifest.graphs
        build.engines += manifest.engines
        build.weight_digests |= manifest.weight_digests
        build.work |= manifest.work
        build.missing = manifest.failed
        build.add(manifest.cost)
        if file is not None:
            window = manifest.generation.window if isinstance(manifest.generation, GenerationFacts) else 0
            facts, reader = manifest.models["mod"], tokens_of(manifest.tokenizer, folder.root)
            build._named_text = file.source(facts.name, reader, facts.vocab_size, manifest.buckets, window)
        # Where nothing runs here, the reasons are given before any work is done.
        forward = [engine for engine in manifest.engines if not engine.writes_text]
        runnable_engines(root, forward, targets, failed=manifest.failed)
        return build

    @property
    def root(self) -> Path:
        """The build folder."""
        return self._store.root

    @property
    def plan(self) -> Plan:
        """The plan. Only a folder that is being built has one."""
        assert self._plan is not None
        return self._plan

    @property
    def workspace(self) -> Workspace:
        """The folder that is being built."""
        assert isinstance(self._store, Workspace)
        return self._store

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Environment of this run."""
        return {**describe_machine(), "threads": self.config.latency.threads}

    # Models, and objects that are made from them.

    def reference(self, kind: ModelKind, role: Role = "forward") -> Reference:
        """Returns the eager model that graphs of a role are judged by."""
        if (kind, role) not in self._references:
            self._references[kind, role] = ROLES[role].reference(self, kind)
        return self._references[kind, role]

    def release_references(self) -> None:
        """Frees the references' copies of the weights, some in float64, which only validation needs."""
        self._references.clear()

    def source(self, graph: Graph) -> GraphSource:
        """Returns what a portable graph is captured from: a module on the meta device, example inputs, and names."""
        key = (graph.model, graph.role, graph.bucket)
        if key not in self._sources:
            self._sources[key] = ROLES[graph.role].source(self, graph)
        return self._sources[key]

    def program(self, graph: Graph, dtype: DType) -> torch.export.ExportedProgram:
        """Captures the eager float32 module with its weights for the bucket of a forward graph, products in `dtype`.

        The program is not kept, because a target makes only one engine of it.
        """
        from mod_export.graph.capture import captured

        model = self.model(graph.model)
        example = tensors_of(model.sample(graph.bucket, 0))
        return captured(model.module(graph.outputs), example, graph.stem, dtype=dtype).program

    # Steps, results and failures.

    def step(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        make: Make,
        is_reusable: Callable[[Any], bool] = lambda result: True,
    ) -> Step:
        """Does or reuses a step of the folder, announced before it starts."""
        self._announce(name)
        step = self._store.step(name, inputs, outputs, make, is_reusable)
        self.steps.append(step)
        return step

    def row_step(
        self, row_type: type[Row], name: str, inputs: Mapping[str, Any], make: Callable[[], Sequence[Row]]
    ) -> list[Row]:
        """Does a step whose results are rows, and keeps the rows for the verdict and the report."""
        step = self.step(name, inputs, [], lambda paths: [row.model_dump(mode="json") for row in make()])
        rows = [row_type.model_validate_json(json.dumps(item)) for item in step.result]
        self._rows += rows
        return rows

    @contextlib.contextmanager
    def attempt(self, stage: str, about: Mapping[str, Any]) -> Iterator[None]:
        """Turns a `BuildError` inside into a row of `failed`, and goes on.

        Other errors, such as a full disk, end the build.

        Args:
            stage: the stage that is running.
            about: fields of `ABOUT` that say what fails; a field that is missing stands for all.
        """
        try:
            yield
        except BuildError as error:
            self.fail(stage, about, error)

    def fail(self, stage: str, about: Mapping[str, Any], error: BuildError, arch: str | None = None) -> None:
        """Records a failure."""
        # Frames of the traceback would keep their tensors in memory while the build goes on.
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        fields = {**dict.fromkeys(ABOUT), **about}
        self.failed.append(FailedRow(stage=stage, **fields, arch=arch, reason=str(error)))
        self._errors.append(error)

    def is_lost(self, about: Mapping[str, Any]) -> bool:
        """Says whether something with these fields of `ABOUT` failed, in this run or when the folder was built."""
        return reason_for((*self.failed, *self.missing), about) is not None

    def require(self, remaining: Iterable[HasModel]) -> None:
        """Ends the build if nothing of the model itself is left.

        Raises:
            BuildError: the first failure of the model, with further failures in its notes.
        """
        if not self.failed or any(entry.model == "mod" for entry in remaining):
            return
        first = next((index for index, row in enumerate(self.failed) if row.model != "dense"), 0)
        error = self._errors[first]
        further = sentences(row for row in self.failed if row.why != self.failed[first].why)
        for sentence in further[:MOST_NOTES]:
            error.add_note(f"also: {sentence}")
        if len(further) > MOST_NOTES:
            error.add_note(f"also: {len(further) - MOST_NOTES} more")
        raise error

    @property
    def gated_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of whole rows that the model has engines for. The gate on speed applies to the largest one."""
        built = {engine.bucket for engine in having(self.engines, model="mod", role="forward")}
        return tuple(bucket for bucket in self.buckets if bucket in built) or self.buckets

    def add(self, rows: Sequence[Result]) -> None:
        """Adds results that follow from others and are no step of their own."""
        self._rows += rows

    def timed_step(
        self,
        row_type: type[Row],
        name: str,
        inputs: Mapping[str, Any],
        make: Callable[[], Sequence[Row]],
        is_sound: Callable[[Sequence[Row]], bool] = lambda rows: True,
    ) -> list[Row]:
        """Does a step whose results are rows with times. They are made anew, although nothing that they depend on has
        changed, if the machine was busy while they were made, or if they are not `is_sound`.
        """

        def measured(paths: Sequence[Path]) -> dict[str, Any]:
            watch = Watch()
            rows = make()
            conditions = watch.conditions()
            return {"rows": [row.model_dump(mode="json") for row in rows], "other_load": conditions.other_load}

        def rows_of(result: Mapping[str, Any]) -> list[Row]:
            return [row_type.model_validate_json(json.dumps(item)) for item in result["rows"]]

        def is_reusable(result: Mapping[str, Any]) -> bool:
            return self.was_quiet(result) and is_sound(rows_of(result))

        return rows_of(self.step(name, inputs, [], measured, is_reusable).result)

    def was_quiet(self, result: Mapping[str, Any]) -> bool:
        """Whether others left the machine to a measurement, whose result has their share of the CPU time."""
        return (result["other_load"] or 0.0) <= self.config.latency.disturbance

    def roofline(self, dtype: DType) -> Roofline | None:
        """Returns the roofline of this machine, measured at most once in a run; None if it is not known."""
        if dtype not in self._rooflines:
            again = self.config.cost.measure_again
            known = cached_roofline(self.machine, dtype, self.config.latency.threads, measure_again=again)
            self._rooflines[dtype] = known
        return self._rooflines[dtype]

    @property
    def rooflines(self) -> list[Roofline]:
        """Every roofline that something in this run was predicted by."""
        return [roofline for roofline in self._rooflines.values() if roofline is not None]

    def rows(self, row_type: type[Row]) -> list[Row]:
        """Returns every result of one type so far."""
        return [row for row in self._rows if isinstance(row, row_type)]

    def hash_of(self, path: str) -> str:
        """Returns the SHA-256 of a file of the folder, as it was built."""
        return self._store.hash_of(path)

    def weights_path(self, kind: ModelKind, dtype: DType) -> str:
        """Returns the weights file of a model and dtype, relative to the root."""
        return self.facts[kind].weights.removesuffix("float32.data") + f"{dtype}.data"

    def weights_hashes(self, kind: ModelKind, dtype: DType) -> list[str]:
        """Returns the SHA-256 of every weights file that engines of a model and dtype read or contain."""
        return [self.hash_of(self.weights_path(kind, stored)) for stored in weights_dtypes(dtype)]

    def identity(self, kind: ModelKind) -> dict[str, Any]:
        """Returns which weights and which spec a model is made of, as an input of steps."""
        about = self.facts[kind].model_dump(include={"checkpoint_sha256", "architecture", "spec"})
        code = {} if self._plan is None else {"code": self._plan.origin_of(kind).code_sha256}
        return {**about, "kind": kind, **code}

    def source_inputs(self, graph: Graph) -> dict[str, Any]:
        """Returns what the source of a portable graph depends on, as an input of steps."""
        about = {"role": graph.role, "bucket": asdict(graph.bucket), "outputs": graph.outputs}
        return {**self.identity(graph.model), **about, **ROLES[graph.role].source_inputs(self, graph)}

    def runnable(self, *roles: Role) -> list[Engine]:
        """Returns the engines of these roles that run here.

        Their target must run, on the GPU that they were built for. Engines that write text also need a target whose
        runners can keep a cache in this machine's memory.
        """
        return [engine for engine in self.engines if engine.role in roles and self._runs(engine)]

    def _runs(self, engine: Engine) -> bool:
        if self.targets and engine.target not in self.targets:
            return False
        if engine.target not in self._availability:
            self._availability[engine.target] = ENGINES[engine.target].availability()
        availability = self._availability[engine.target]
        return availability.can_run(engine) and (not engine.writes_text or ENGINES[engine.target].binds)

    @property
    def named_text(self) -> NamedText | None:
        """The user's file that the model is judged and timed on; None if there is none."""
        return None if self._named_text is None else self._named_text.named

    @property
    def text_source(self) -> TextSource | None:
        """The user's text, or else text for a model that has none of its own, if it has a tokenizer."""
        return self._named_text or self._documentation

    @cached_property
    def _documentation(self) -> TextSource | None:
        vocab_size = self.facts["mod"].vocab_size
        try:
            reader = tokens_of(self._vocabulary, self.root)
        except UsageError:
            return None  # A server that only times engines may have no package for tokenizers.
        return None if vocab_size is None or reader is None else documentation_of(reader, vocab_size)

    @property
    def _vocabulary(self) -> str | None:
        # A folder that is being built may still hold the tokenizer of an earlier build, until its last stage.
        return self.plan.vocabulary if self.finished is None else self.finished.manifest.tokenizer

    @property
    def text_inputs(self) -> dict[str, Any]:
        """What the text depends on, as an input of steps."""
        named, vocabulary = self.named_text, self._vocabulary
        return {
            "seed": self.config.seed,
            "tokenizer": self.hash_of(TOKENIZER) if vocabulary == TOKENIZER else None,
            **({} if named is None else {"named": named.sha256}),
        }

    def texts(self, rows: int, length: int) -> tuple[np.ndarray, TextKind]:
        """Returns pieces of text for timing, int64 (rows, length), and where they come from.

        A finished folder has no held-out text of its model, because timing needs no model.
        """
        vocab_size = self.facts["mod"].vocab_size
        assert vocab_size is not None, "only a model of token ids writes text"
        model = None if self._plan is None else self.model("mod")
        ids_BS = prompts_of(model, vocab_size, rows, length, self.config.seed, self.text_source)
        return ids_BS, text_kind(model, length, self.text_source)

    def feeds(self, bucket: Bucket) -> Mapping[str, np.ndarray]:
        """Returns inputs for timing, by name. Shapes are static, so the time does not depend on the values."""
        vocab_size = self.facts["mod"].vocab_size
        if vocab_size is not None:
            return tokens_sample(vocab_size, bucket, self.config.seed)
        return first_sample(self.root, bucket)

    def decoding_engines(self) -> DecodingEngines:
        """Returns the prefill and decode engines, opened as serving opens them."""
        engines = [engine for engine in self.engines if engine.writes_text]
        return DecodingEngines(engines, self._load, self.config)

    def _load(self, engine: Engine) -> Runner:
        return ENGINES[engine.target].load(self.root, engine, self.config, self.config.latency.threads)

    def graph_of(self, engine: Engine) -> Graph:
        """Returns the graph that an engine was built from; the portable one if the engine was built from a program."""
        graph = graph_of(engine, self.graphs)
        assert graph is not None, engine.path
        return graph

    def target_options(self, target: str) -> dict[str, Any]:
        """Returns the target's options that every engine depends on, when it is built or loaded. Variants cover the
        others.
        """
        options: dict[str, Any] = self.config.target.model_dump(mode="json", by_alias=True)[target]
        # Options that only shape the graph are covered by its hash.
        return {key: value for key, value in options.items() if key not in ("dtypes", "architectures", "query_block")}

    def conditions(self, engines: Sequence[Engine]) -> dict[str, Any]:
        """Returns what a result on this machine depends on, besides its options."""
        targets = dict.fromkeys(engine.target for engine in engines)
        return {
            "engines": [self.hash_of(engine.path) for engine in engines],
            "weights": [self.weights_hashes(engine.model, engine.dtype) for engine in engines],
            "target_options": {target: self.target_options(target) for target in targets},
            "threads": self.config.latency.threads,
            "machine": [self.machine[name] for name in ("cpu", "cores", "usable_cores", "gpu")],
            "versions": {
                **versions("mod_export", "torch", "onnxruntime"),
                **{name: version for target in targets for name, version in ENGINES[target].versions().items()},
            },
        }

    def judging_inputs(self, candidate: Candidate, **options: Any) -> dict[str, Any]:
        """Returns what a judgement of a candidate depends on, as inputs of a step."""
        kind, dtype = candidate.setting.model, candidate.setting.dtype
        return {
            **self.conditions([candidate.engine] if candidate.engine else []),
            "file": self.hash_of(candidate.path),
            "weights": self.weights_hashes(kind, dtype),
            "options": options,
            "seed": self.config.seed,
            "checkpoint": self.identity(kind),
        }

    def timing_inputs(self, engines: Iterable[Engine], **options: Any) -> dict[str, Any]:
        """Returns what a timing depends on, as inputs of a step."""
        return {**self.conditions(list(engines)), "seed": self.config.seed, **options}

    def versions(self, *names: str) -> dict[str, Any]:
        """Returns library versions, including this package's source, as an input of a step."""
        return {"versions": versions("mod_export", *names)}

    # Methods for a folder that is being built.

    def planned(self) -> Iterator[tuple[EngineBuilder, Variant, Graph]]:
        """Yields every engine that can still be built, with its portable graph as it was captured."""
        captured = {graph.path: graph for graph in self.graphs}
        for builder, variant, graph in self.plan.engines():
            about = {**fields_of_graph(graph), "target": builder.name, "dtype": variant.dtype}
            if graph.path in captured and self.is_wanted(about):
                yield builder, variant, captured[graph.path]

    def is_wanted(self, about: Mapping[str, Any]) -> bool:
        """Says whether this can still be built. Without the model, a dense baseline has nothing to be compared with."""
        return not self.is_lost(about) and not self.is_lost({**about, "model": "mod"})

    def leave_out(self, engine: Engine) -> None:
        """Takes a built engine out of the build again, because it is of no use alone."""
        self.engines.remove(engine)
        self.workspace.leave_out(engine_step(engine))


def engine_step(engine: Engine) -> str:
    """Returns the name of the step that builds an engine."""
    return f"engine/{engine.target}/{engine.stem}"


def _facts(plan: Plan, kind: ModelKind) -> ModelFacts:
    origin, model = plan.origin_of(kind), plan.models[kind]
    return ModelFacts(
        name=origin.name,
        architecture=origin.architecture,
        checkpoint_sha256=origin.checkpoint_sha256,
        spec=dict(model.spec),
        vocab_size=None if model.tokens is None else model.tokens.vocab_size,
        weights=plan.weights_path(kind, "float32"),
        tensors=tuple(sorted(model.weights)),
    )


def _generation_facts(plan: Plan) -> GenerationFacts:
    assert isinstance(plan.generation, GenerationPlan)
    models = plan.generation.models
    decodes = list(dict.fromkeys(graph.bucket for graph in having(plan.graphs, role="decode")))
    lengths = sorted({bucket.seq for bucket in decodes})
    return GenerationFacts(
        window=plan.generation.window,
        sites={kind: tuple(model.sites) for kind, model in models.items()},
        capacity=dict(models["mod"].capacity),
        kv_bytes={
            kind: {length: sum(model.kv_bytes(length).values()) for length in lengths} for kind, model in models.items()
        },
        step_bytes={
            bucket.name: {"float32": {kind: step_bytes(model, bucket) for kind, model in models.items()}}
            for bucket in decodes
        },
    )
