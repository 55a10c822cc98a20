"""Whether prefill and decode engines do what the eager model does, and what deciding a token at a time costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mod_export.artifacts import Engine, ModelKind, Outputs, engine_stem
from mod_export.engine import ENGINES
from mod_export.environment import package_version
from mod_export.generation.opened import GRAPH, DecodingEngines, writing_here
from mod_export.plan import GenerationPlan
from mod_export.stages.context import Context
from mod_export.validate.decoding import parity_of_decoding, reference_outputs, texts_of_decoding
from mod_export.validate.reference import Reference
from mod_export.validate.rows import ParityRow
from mod_export.validate.written import QualityRow, TextsRow, quality_of
from mod_export.workspace import Step

__all__ = ["decoding_engines", "judge_decoding"]

QUALITY_TEXTS = 4


def decoding_engines(context: Context) -> DecodingEngines:
    """Those that keep their cache in this machine's memory."""
    return DecodingEngines(context.root, writing_here(context.generation.engines), context.plan.config)


def graphs_of_plans(context: Context) -> DecodingEngines:
    """The graphs that plans were made of, where ONNX Runtime has CPU kernels for them, in the form of engines."""
    graphs = [
        Engine(
            target=f"{graph.target}{GRAPH}",
            model=graph.model,
            bucket=graph.bucket,
            dtype=graph.dtype,
            path=graph.path,
            weights=context.weights_path(graph.model, graph.dtype),
            role=graph.role,
        )
        for graph in context.generation.graphs
        if graph.target and not ENGINES[graph.target].binds and graph.dtype != "bfloat16"
    ]
    return DecodingEngines(context.root, graphs, context.plan.config)


def judge_decoding(context: Context, plan: GenerationPlan) -> list[Step]:
    """Parity of every engine that runs here and of the graphs of plans, texts of both, and quality."""
    evidence = _Evidence(context, plan)
    engines = evidence.engines.engines
    steps = [evidence.parity(engine, evidence.engines) for engine in engines]
    plans = graphs_of_plans(context) if package_version("onnxruntime") else None
    steps += [evidence.parity(graph, plans) for graph in plans.engines] if plans else []
    if context.plan.config.generation.compared_texts:
        steps += [evidence.texts(engine) for engine in engines if engine.role == "decode"]
    return [*steps, evidence.quality()]


class _Evidence:
    def __init__(self, context: Context, plan: GenerationPlan) -> None:
        self._context, self._plan = context, plan
        self._references: dict[tuple[ModelKind, Outputs], Reference] = {}
        self.engines = decoding_engines(context)

    def parity(self, engine: Engine, engines: DecodingEngines) -> Step:
        config = self._context.plan.config
        inputs = {
            **self._inputs(engine, engines),
            "gate": config.parity.gate(engine.dtype).model_dump(),
            "tokens": config.generation.judged_tokens,
        }
        step = self._context.step(f"parity/{_stem(engine)}", inputs, [], partial(self._judged, engine, engines))
        self._context.generation.parity.append(ParityRow(**step.result))
        return step

    def _judged(self, engine: Engine, engines: DecodingEngines, paths: Sequence[Path]) -> dict[str, Any]:
        reference = self._reference(engine.model, reference_outputs(engine))
        return asdict(parity_of_decoding(engines, engine, self._plan.models[engine.model], reference))

    def texts(self, engine: Engine) -> Step:
        options = self._context.plan.config.generation
        inputs = {
            **self._inputs(engine, self.engines),
            "texts": options.compared_texts,
            "tokens": options.compared_tokens,
        }
        step = self._context.step(
            f"texts/{_stem(engine)}",
            inputs,
            [],
            lambda paths: asdict(texts_of_decoding(self.engines, engine, self._plan.models[engine.model])),
        )
        self._context.generation.texts.append(TextsRow(**step.result))
        return step

    def quality(self) -> Step:
        context, config = self._context, self._context.plan.config
        inputs = {
            **context.identity("mod"),
            "generation": self._plan.models["mod"].loaded.spec,
            "seed": config.seed,
            **context.versions("torch"),
        }
        step = context.step("quality", inputs, [], self._quality)
        context.generation.quality = None if step.result is None else QualityRow(**step.result)
        return step

    def _quality(self, paths: Sequence[Path]) -> dict[str, Any] | None:
        own = Reference(self._context.plan.model.loaded)
        causal = self._reference("mod", "logits")
        found = quality_of(self._plan.models["mod"], causal, own, QUALITY_TEXTS, self._context.plan.config.seed)
        return None if found is None else asdict(found)

    def _reference(self, kind: ModelKind, outputs: Outputs) -> Reference:
        """The eager model; those that return different things share their weights."""
        if (kind, outputs) not in self._references:
            known = next((one for (other, _), one in self._references.items() if other == kind), None)
            module = None if known is None else known.module
            self._references[kind, outputs] = Reference(self._plan.models[kind].loaded, module, outputs=outputs)
        return self._references[kind, outputs]

    def _inputs(self, engine: Engine, engines: DecodingEngines) -> dict[str, Any]:
        prefills = engines.prefills(engine.model, engine.target, engine.dtype)
        known = engine.target in self._context.plan.targets
        return {
            **(self._context.conditions([engine]) if known else self._context.versions("torch", "onnxruntime")),
            "file": self._context.workspace.hash_of(engine.path),
            "prompts": [self._context.workspace.hash_of(one.path) for one in prefills],
            "seed": self._context.plan.config.seed,
            "checkpoint": self._context.identity(engine.model),
        }


def _stem(engine: Engine) -> str:
    return f"{engine.target}/{engine_stem(engine.model, engine.bucket, engine.dtype, role=engine.role)}"
