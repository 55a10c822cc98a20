"""What stages do differently for each of the three roles: which graphs are captured, judged and timed, and how.

A `forward` graph reads whole rows. A `prefill` graph reads a part of a prompt, and a `decode` graph one token of each
row; both continue what a cache holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from mod_export.config import BuildConfig, GenerationOptions
from mod_export.engines import ENGINES
from mod_export.folder.manifest import GenerationFacts
from mod_export.judge.reference import Reference, tensors_of
from mod_export.measure.decode import measure_prompts, measure_steps
from mod_export.measure.latency import measure_latency
from mod_export.measure.verdict import gate_of, is_undisturbed
from mod_export.model.model import GraphSource
from mod_export.rows.correctness import CausalityRow, ParityRow
from mod_export.rows.speed import DecodeRow, FirstTokenRow, LatencyRow, TextsRow
from mod_export.runtime.decoding_engines import DecodingEngines
from mod_export.types import QUANTIZED, Bucket, Engine, Graph, ModelKind, Outputs, Role, Setting

if TYPE_CHECKING:
    from mod_export.judge.candidates import Candidate
    from mod_export.judge.decode import Runs
    from mod_export.judge.parity import Fresh
    from mod_export.judge.text import TextSource
    from mod_export.pipeline.build import Build

Engines = Mapping[ModelKind, Engine]
"""The engines of one setting: that of the model, and that of its dense baseline if there is one."""
OpenRuns: TypeAlias = "Callable[[DecodingEngines, Engine, Reference, TextSource | None], AbstractContextManager[Runs]]"


class RoleStages(ABC):
    """The parts of the stages that depend on the role of a graph or engine.

    Attributes:
        role: the role.
        reads_several_tokens: whether a graph reads several tokens of a row at once.
    """

    role: Role
    reads_several_tokens = True

    @abstractmethod
    def outputs(self, config: BuildConfig) -> Outputs:
        """Says what the graphs return."""

    @abstractmethod
    def source(self, build: Build, graph: Graph) -> GraphSource:
        """Returns what a portable graph is captured from."""

    @abstractmethod
    def source_inputs(self, build: Build, graph: Graph) -> dict[str, Any]:
        """Returns what `source` depends on besides the model, the bucket and the outputs, as inputs of a step."""

    @abstractmethod
    def reference(self, build: Build, kind: ModelKind) -> Reference:
        """Returns the eager model that graphs of this role are judged by."""

    def can_be_judged(self, candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
        """Says whether a graph can be run in place of an engine, with these other graphs."""
        return True

    @abstractmethod
    def parity_inputs(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Returns the options that parity depends on besides its gate, as inputs of a step."""

    @abstractmethod
    def parity(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], fresh: Fresh) -> ParityRow:
        """Compares a candidate with the reference. This needs PyTorch and ONNX; timing does not.

        `fresh` exports a graph again, to find where a wrong one differs.
        """

    @abstractmethod
    def further(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], allowed: float) -> None:
        """Examines an engine whose parity was judged; `allowed` is the error that parity allows it."""

    @abstractmethod
    def time(self, build: Build, setting: Setting, engines: Engines) -> None:
        """Times the engines of one setting, interleaved."""


class ForwardRole(RoleStages):
    """Graphs of whole rows: parity of every output, causality, latency."""

    role = "forward"

    def outputs(self, config: BuildConfig) -> Outputs:
        return config.returned

    def source(self, build: Build, graph: Graph) -> GraphSource:
        model = build.model(graph.model)
        samples = [model.sample(graph.bucket, seed) for seed in range(2)]
        first, second = (tuple(tensor.to("meta") for tensor in tensors_of(feeds)) for feeds in samples)
        module = model.skeleton(graph.outputs).to("meta")
        return GraphSource(module, (first, second), tuple(samples[0]), model.output_names(graph.outputs))

    def source_inputs(self, build: Build, graph: Graph) -> dict[str, Any]:
        return {}

    def reference(self, build: Build, kind: ModelKind) -> Reference:
        return Reference(build.model(kind), build.config.returned, kept=build.kept_runs)

    def parity_inputs(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
        parity = build.config.parity
        needs_text = candidate.setting.dtype in QUANTIZED or build.named_text is not None
        text = build.text_inputs if needs_text else {}
        return {"batches": parity.batches_per_kind, "texts": parity.text_batches, **text}

    def parity(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], fresh: Fresh) -> ParityRow:
        from mod_export.judge.parity import parity_of

        reference = build.reference(candidate.setting.model)
        return parity_of(build.root, candidate, reference, build.config, fresh, build.text_source)

    def further(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], allowed: float) -> None:
        from mod_export.judge.causality import causality_of

        setting, parity = candidate.setting, build.config.parity
        # The gate's options rather than `allowed`, which is measured and differs from run to run.
        options = parity.gate(setting.dtype).model_dump(include={"rounding_error", "max_abs"})
        options |= {"batches": parity.batches_per_kind, "texts": parity.text_batches, "suffixes": parity.suffixes}
        build.row_step(
            CausalityRow,
            f"causality/{setting.target}/{setting.name}",
            build.judging_inputs(candidate, **options),
            lambda: [causality_of(build.root, candidate, build.reference(setting.model), build.config, allowed)],
        )

    def time(self, build: Build, setting: Setting, engines: Engines) -> None:
        # Sampling goes on until the gate is settled, so another gate may need more samples.
        options = build.config.latency
        gate = gate_of(setting.bucket, build.gated_buckets, options.min_speedup)
        latency = options.model_dump(exclude={"min_speedup", "bootstrap"})
        rows = build.timed_step(
            LatencyRow,
            f"latency/{setting.target}/{setting.bucket.name}-{setting.dtype}",
            build.timing_inputs(engines.values(), latency=latency, gate=gate),
            lambda: measure_latency(build.root, engines, build.feeds(setting.bucket), build.config, gate),
            lambda rows: is_undisturbed(rows, options, build.config.seed),
        )
        build.add(rows)


class WritingRole(RoleStages):
    """What prefill and decode have in common: both are judged token by token, with the engines of both."""

    @abstractmethod
    def buckets(self, options: GenerationOptions, window: int) -> list[Bucket]:
        """Returns the shapes of the graphs, ascending, for texts of up to `window` tokens."""

    def source_inputs(self, build: Build, graph: Graph) -> dict[str, Any]:
        model = build.generating(graph.model)
        return {"generation": [model.whole_rows.spec, model.window, build.config.generation.slots]}

    @abstractmethod
    def runs(self) -> OpenRuns:
        """Returns the function that opens the runs by which an engine is judged."""

    def beside(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Returns what results about an engine depend on besides it: how the eager model selects, and the texts."""
        generation = build.config.generation.model_dump(include={"window", "slack", "slots"})
        return {"generation": generation | build.text_inputs}

    def parity_inputs(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
        return {"tokens": build.config.generation.judged_tokens, **self.beside(build, candidate, candidates)}

    def parity(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], fresh: Fresh) -> ParityRow:
        from mod_export.judge.decode import parity_of_runs

        engine, reference = candidate.as_engine, build.reference(candidate.setting.model, self.role)
        opened = self.runs()(_decoding(build, candidates), engine, reference, build.text_source)
        return parity_of_runs(opened, engine, reference, build.config)


class PrefillRole(WritingRole):
    """Graphs that read a part of one prompt: parity of the last token's logits, time to the first token."""

    role = "prefill"

    def buckets(self, options: GenerationOptions, window: int) -> list[Bucket]:
        return [Bucket(1, length) for length in options.prompt_lengths(window)]

    def outputs(self, config: BuildConfig) -> Outputs:
        return "last"

    def source(self, build: Build, graph: Graph) -> GraphSource:
        model, bucket = build.generating(graph.model), graph.bucket
        length, longest = build.config.generation.cache_of_prompts(model.window)
        return model.prefill(bucket.batch, bucket.seq, length, longest)

    def source_inputs(self, build: Build, graph: Graph) -> dict[str, Any]:
        cache = build.config.generation.cache_of_prompts(build.generating(graph.model).window)
        return {**super().source_inputs(build, graph), "cache": cache}

    def reference(self, build: Build, kind: ModelKind) -> Reference:
        # Prefill and decode share captured programs.
        return build.reference(kind, "decode").returning("last")

    def runs(self) -> OpenRuns:
        from mod_export.judge.decode import runs_of_prompts

        return runs_of_prompts

    def further(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], allowed: float) -> None:
        """Does nothing: parity says everything about a prompt."""

    def time(self, build: Build, setting: Setting, engines: Engines) -> None:
        decoding = build.decoding_engines()
        rows = build.timed_step(
            FirstTokenRow,
            f"first_token/{setting.target}/{setting.bucket.name}-{setting.dtype}",
            build.timing_inputs(
                engines.values(),
                text=build.text_inputs,
                latency=build.config.latency.model_dump(exclude={"min_speedup"}),
            ),
            lambda: [measure_prompts(decoding, engines, build.texts(1, setting.bucket.seq)[0][0])],
        )
        build.add(rows)


class DecodeRole(WritingRole):
    """Graphs that add one token to each text: parity of every step, whole texts, time of a step."""

    role = "decode"
    reads_several_tokens = False

    def buckets(self, options: GenerationOptions, window: int) -> list[Bucket]:
        return sorted(Bucket(batch, cache) for batch in options.batches for cache in options.cache_lengths(window))

    def outputs(self, config: BuildConfig) -> Outputs:
        return "logits"

    def source(self, build: Build, graph: Graph) -> GraphSource:
        batch, length = graph.bucket.batch, graph.bucket.seq
        return build.generating(graph.model).step(batch, length, build.config.generation.slots)

    def reference(self, build: Build, kind: ModelKind) -> Reference:
        if build.generating(kind).whole_rows.spec == build.model(kind).spec:
            # Both forms decide alike, so the programs and runs of whole rows can be used here too.
            return build.reference(kind).returning("logits")
        return Reference(build.generating(kind).whole_rows, kept=build.kept_runs)

    def can_be_judged(self, candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
        # A step is judged after a prompt, so it needs a graph that reads prompts, and that one may have failed.
        reader = replace(candidate.setting, role="prefill")
        return any(replace(other.setting, bucket=reader.bucket) == reader for other in candidates)

    def beside(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate]) -> dict[str, Any]:
        # Steps are judged after prompts, so the engines that read these count as well.
        setting = candidate.setting
        prefills = _decoding(build, candidates).prefills(setting.model, setting.target, setting.dtype)
        prompts = [build.hash_of(engine.path) for engine in prefills]
        return {**super().beside(build, candidate, candidates), "prompts": prompts}

    def runs(self) -> OpenRuns:
        from mod_export.judge.decode import runs_of_steps

        return runs_of_steps

    def further(self, build: Build, candidate: Candidate, candidates: Sequence[Candidate], allowed: float) -> None:
        from mod_export.judge.decode import texts_of_decoding

        options, setting = build.config.generation, candidate.setting
        if not options.compared_texts:
            return
        model = build.generating(setting.model)

        def make() -> list[TextsRow]:
            reference = build.reference(setting.model, "decode")
            decoding = _decoding(build, candidates)
            return [texts_of_decoding(decoding, candidate.as_engine, model, reference, build.text_source)]

        wanted = {"texts": options.compared_texts, "tokens": options.compared_tokens}
        inputs = build.judging_inputs(candidate, **wanted, **self.beside(build, candidate, candidates))
        build.row_step(TextsRow, f"texts/{setting.target}/{setting.name}", inputs, make)

    def time(self, build: Build, setting: Setting, engines: Engines) -> None:
        facts, config = build.generation, build.config
        assert isinstance(facts, GenerationFacts)
        decoding = build.decoding_engines()
        # Prefill engines read the texts at whose positions steps are timed, so the times depend on these engines too.
        readers = [engine for kind in engines for engine in decoding.prefills(kind, setting.target, setting.dtype)]
        prompts = [build.hash_of(engine.path) for engine in readers]

        def make() -> list[DecodeRow]:
            B, S = setting.bucket.batch, setting.bucket.seq
            turns = -(-config.generation.measured_texts // B)
            ids_NS, kind = build.texts(turns * B, S)
            step_bytes = facts.step_bytes[setting.bucket.name][setting.dtype]
            limits = ENGINES[setting.target].limits
            row = measure_steps(decoding, engines, ids_NS.reshape(turns, B, S), facts.sites, step_bytes, limits)
            return [row.model_copy(update={"text": kind})]

        rows = build.timed_step(
            DecodeRow,
            f"decode/{setting.target}/{setting.bucket.name}-{setting.dtype}",
            build.timing_inputs(
                engines.values(),
                positions=config.generation.measured_tokens,
                texts=config.generation.measured_texts,
                text=build.text_inputs,
                prompts=prompts,
                latency=config.latency.model_dump(include={"max_seconds", "resolution"}),
            ),
            make,
        )
        # The dtype does not matter: bytes of any dtype move at the same rate.
        roofline = build.roofline("float32")
        bandwidth = None if roofline is None else roofline.bandwidth_gbs
        build.add([row.predicted(bandwidth) for row in rows])


WRITING: tuple[WritingRole, ...] = (PrefillRole(), DecodeRole())
ROLES: Mapping[Role, RoleStages] = {stages.role: stages for stages in (ForwardRole(), *WRITING)}
"""Every role, in the order in which its engines are timed."""


def _decoding(build: Build, candidates: Sequence[Candidate]) -> DecodingEngines:
    """Returns the prefill and decode candidates, opened as validation opens them."""
    by_path = {candidate.path: candidate for candidate in candidates if candidate.setting.writes_text}
    return DecodingEngines(
        [candidate.as_engine for candidate in by_path.values()],
        lambda engine: by_path[engine.path].open(build.root, build.config),
        build.config,
    )
