"""The candidates: every engine that runs here, and every graph that ONNX Runtime's CPU kernels can run in its place.

A plan for a GPU that is not here cannot be run, but the graph that it was built from can. A portable graph of whole
rows is judged too, because it can be used without an engine. A graph with the same bytes as a judged engine is not run
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.protocol import Runner
from mod_export.environment import package_version, usable_cores
from mod_export.types import QUANTIZED, DType, Engine, Graph, ModelKind, Setting, graph_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine, or a graph that stands on its own.

    Attributes:
        setting: its setting. The target of a graph is `portable`, or a name such as `tensorrt-rtx graph`.
        path: path of the file.
        weights: the weights file that it reads; None if it contains its weights.
        graph: the content of the file; None if it is not an ONNX graph.
        engine: the engine; None for a graph that is not an engine.
        source: path of the graph that an engine was built from; None if it was not built from a graph.
        engine_judged: whether an engine made from this graph is judged on all inputs, so that one input of each kind
            is enough here.
    """

    setting: Setting
    path: str
    weights: str | None
    graph: Graph | None
    engine: Engine | None
    engine_judged: bool = False
    source: str | None = None

    @property
    def as_engine(self) -> Engine:
        """The engine, or the graph in the form of one."""
        setting = self.setting
        return self.engine or Engine(
            target=setting.target, model=setting.model, bucket=setting.bucket, dtype=setting.dtype, path=self.path,
            weights=self.weights, role=setting.role,
        )  # fmt: skip

    def open(self, root: Path, config: BuildConfig, weights: Mapping[str, np.ndarray] | None = None) -> Runner:
        """Loads the candidate to run on all cores; `weights` replace those of the same name in the weights file.

        Raises:
            TargetError: this machine cannot run it.
            EngineError: the file is not usable, or its weights cannot be replaced.
        """
        if self.engine is not None:
            return ENGINES[self.setting.target].load(root, self.engine, config, usable_cores(), weights)
        session = session_from_onnx(root / self.path, root / "graphs", [CPU], usable_cores(), {}, weights)
        return OrtRunner(session, self.path, usable_cores())


def candidates_from_engines(engines: Sequence[Engine], graphs: Sequence[Graph]) -> list[Candidate]:
    """Returns a candidate for each engine; it has a graph if the engine file is an ONNX graph."""
    candidates = []
    for engine in engines:
        graph = graph_of(engine, graphs) if ENGINES[engine.target].from_onnx else None
        is_graph = engine.path.endswith(".onnx")
        source = engine.path if is_graph else None if graph is None else graph.path
        own_graph = graph if is_graph else None
        candidates.append(Candidate(engine.setting, engine.path, engine.weights, own_graph, engine, source=source))
    return candidates


def candidates_from_graphs(
    graphs: Sequence[Graph],
    judged: Sequence[Candidate],
    weights_of: Callable[[ModelKind, DType], str],
    hash_of: Callable[[str], str],
) -> list[Candidate]:
    """Returns a candidate for each graph that ONNX Runtime can run on this CPU and that no judged engine contains.

    `weights_of` returns the weights file of a model and dtype, `hash_of` the SHA-256 of a file as it was built.
    """
    if package_version("onnxruntime") is None:
        return []
    known = {hash_of(candidate.path) for candidate in judged}
    with_graph = {(c.graph.model, c.graph.role, c.graph.bucket) for c in judged if c.graph is not None}
    candidates = []
    for graph in graphs:
        if not _is_runnable(graph) or (not graph.writes_text and hash_of(graph.path) in known):
            continue
        target = "portable" if graph.target is None else f"{graph.target} graph"
        setting = Setting(target=target, dtype=graph.dtype, model=graph.model, role=graph.role, bucket=graph.bucket)
        judged_with = graph.target is None and (graph.model, graph.role, graph.bucket) in with_graph
        weights = weights_of(graph.model, graph.dtype)
        candidates.append(
            Candidate(setting, graph.path, weights, graph, None, engine_judged=judged_with, source=graph.path)
        )
    return candidates


def _is_runnable(graph: Graph) -> bool:
    if graph.dtype == "bfloat16":
        return False  # ONNX Runtime has no bfloat16 kernels for CPUs.
    if graph.dtype in QUANTIZED and graph.target is not None and ENGINES[graph.target].limits.rounds_activations:
        return False  # ONNX Runtime would round other values than the engine.
    if graph.writes_text:
        # Portable graphs are judged through the engines that are made from them on this CPU.
        return graph.target is not None and not ENGINES[graph.target].binds
    return True
