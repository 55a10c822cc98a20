"""What the stages of one build share: the plan, the workspace, what was captured, and what has been made so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.artifacts import Bucket, DType, Engine, Graph, ModelKind
from mod_export.environment import describe_machine, versions
from mod_export.graph.capture import exported_from_module
from mod_export.measure.cost import CostRow
from mod_export.measure.decoding import DecodeRow, FirstTokenRow
from mod_export.measure.latency import LatencyRow
from mod_export.measure.parts import PartRow
from mod_export.measure.precision import PrecisionRow
from mod_export.measure.roofline import Roofline
from mod_export.measure.work import Work
from mod_export.plan import Plan
from mod_export.validate.causality import CausalityRow
from mod_export.validate.maps import RoutingMapRow
from mod_export.validate.reference import Reference
from mod_export.validate.rows import ParityRow
from mod_export.validate.structure import StructureRow
from mod_export.validate.written import QualityRow, TextsRow
from mod_export.workspace import Step, Workspace

if TYPE_CHECKING:
    import torch

__all__ = ["Captures", "Context", "Generation"]


@dataclass(slots=True)
class Generation:
    """What the stage of the same name has made and found.

    Attributes:
        graphs: portable, and of targets.
        engines: of prefill and decode buckets.
        parity: of both, against the eager model.
        texts: what engines and eager model wrote.
        decode: time of steps, model against dense twin.
        first_token: time of prompts.
        quality: what deciding one token at a time costs.
    """

    graphs: list[Graph] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    parity: list[ParityRow] = field(default_factory=list)
    texts: list[TextsRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    first_token: list[FirstTokenRow] = field(default_factory=list)
    quality: QualityRow | None = None


class Captures:
    """What is captured, made when it is first asked for: a build that reuses everything needs none of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._skeletons: dict[ModelKind, torch.nn.Module] = {}

    def skeleton(self, kind: ModelKind) -> torch.nn.Module:
        """The module without values, on the meta device: a graph is the same whatever the weights are."""
        if kind not in self._skeletons:
            self._skeletons[kind] = self._plan.loaded(kind).skeleton(self._plan.config.outputs).to("meta")
        return self._skeletons[kind]

    def program(self, kind: ModelKind, bucket: Bucket) -> torch.export.ExportedProgram:
        """The eager float32 module with its weights, captured for one bucket."""
        return exported_from_module(self._plan.loaded(kind).module(self._plan.config.outputs), bucket, kind)


class Context:
    """One run of the stages over one plan. A stage reads what earlier stages left here and adds its own."""

    def __init__(self, plan: Plan, workspace: Workspace, each_step: Callable[[str], None]) -> None:
        self.plan = plan
        self.workspace = workspace
        self.captures = Captures(plan)
        self.graphs: dict[tuple[ModelKind, Bucket], Graph] = {}
        self.target_graphs: dict[tuple[str, DType, ModelKind, Bucket], Graph] = {}
        self.engines: list[Engine] = []
        self.cost: list[CostRow] = []
        self.weight_digests: dict[str, dict[str, str]] = {}
        self.structure: list[StructureRow] = []
        self.parity: list[ParityRow] = []
        self.causality: list[CausalityRow] = []
        self.maps: list[RoutingMapRow] = []
        self.latency: list[LatencyRow] = []
        self.precision: list[PrecisionRow] = []
        self.work: dict[str, tuple[Work, ...]] = {}
        self.rooflines: list[Roofline] = []
        self.parts: list[PartRow] = []
        self.generation = Generation()
        self._references: dict[ModelKind, Reference] = {}
        self._each_step = each_step

    @property
    def root(self) -> Path:
        """The build folder."""
        return self.workspace.root

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Environment of this run."""
        return {**describe_machine(), "threads": self.plan.config.latency.threads}

    def step(
        self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str], make: Callable[[Sequence[Path]], Any]
    ) -> Step:
        """A step of the workspace, announced before it starts."""
        self._each_step(name)
        return self.workspace.step(name, inputs, outputs, make)

    def identity(self, kind: ModelKind) -> dict[str, Any]:
        """Which weights and which architecture a kind is made of."""
        model = (self.plan.baseline if kind == "dense" else None) or self.plan.model
        return {
            "checkpoint": model.checkpoint_sha256,
            "architecture": model.architecture,
            "code": model.code_sha256,
            # The spec is the checkpoint's, but for a capacity that was replaced.
            "spec": self.plan.loaded(kind).spec,
            "kind": kind,
        }

    def weights_path(self, kind: ModelKind, dtype: DType) -> str:
        """The weights file of a kind and dtype, relative to the root."""
        return f"graphs/{self.plan.weights_of(kind)}-{dtype}.data"

    def reference(self, kind: ModelKind) -> Reference:
        """The eager model of a kind."""
        if kind not in self._references:
            self._references[kind] = Reference(self.plan.loaded(kind), outputs=self.plan.config.outputs)
        return self._references[kind]

    def all_graphs(self) -> list[Graph]:
        """Portable graphs and those of targets, each once."""
        graphs = (*self.graphs.values(), *self.target_graphs.values())
        return list({graph.path: graph for graph in graphs}.values())

    def runnable(self) -> list[Engine]:
        """Engines that run here: their target does, and it is their GPU if they were built for one."""
        return [engine for engine in self.engines if self.plan.availability[engine.target].can_run(engine)]

    def conditions(self, engines: Sequence[Engine]) -> dict[str, Any]:
        """What a result on this machine depends on beside its settings."""
        hash_of = self.workspace.hash_of
        return {
            "engines": [hash_of(engine.path) for engine in engines],
            "weights": [hash_of(self.weights_path(engine.model, engine.dtype)) for engine in engines],
            "threads": self.plan.config.latency.threads,
            "machine": [self.machine["cpu"], self.machine["cores"], self.machine["gpu"]],
            "versions": {
                **versions("mod_export", "torch", "onnxruntime"),
                **{
                    name: found
                    for engine in engines
                    for name, found in self.plan.targets[engine.target].versions().items()
                },
            },
        }

    def versions(self, *names: str) -> dict[str, Any]:
        """Versions as an input of a step, this package's source among them."""
        return {"versions": versions("mod_export", *names)}
