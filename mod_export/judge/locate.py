"""Finds the place where a failed candidate goes wrong: the layer, and in a graph the operator.

An ONNX file is compared with a fresh export of the same model, value by value, on the same kernels without any
optimisation. Equal graphs give equal bits, so the first value that differs is where the fault is, however small the
difference. If the values inside an engine cannot be read, the fault is searched by depth: zero weights silence the
layers above a depth, in the engine and in the reference, and bisection finds the layer with which the fault appears.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.environment import usable_cores
from mod_export.graph.nodes import graph_from_bytes, graph_from_file, module_of, numbered_layer
from mod_export.judge.inputs import Batch
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.judge.values import AT_ONCE, opened, producers
from mod_export.model.model import Model
from mod_export.rows.correctness import Located
from mod_export.types import Engine


def locate_in_graph(root: Path, path: str, fresh: bytes, batches: Sequence[Batch]) -> Located | None:
    """Compares an ONNX file of the build folder with a fresh export, batch by batch until the values differ.

    None if both give the same bits everywhere: the fault is then not in the graph.

    Raises:
        BuildError: one of the two graphs cannot be made or run.
    """
    candidate, expected_graph = graph_from_file(root / path), graph_from_bytes(fresh)
    ours_by, theirs_by = producers(candidate), producers(expected_graph)
    names = [name for name in ours_by if name in theirs_by]
    with opened(candidate, root, names) as ours, opened(expected_graph, root, names) as theirs:
        for batch in batches:
            feeds = {name: array for name, array in batch.feeds.items() if name in ours.inputs}
            for start in range(0, len(names), AT_ONCE):
                chunk = names[start : start + AT_ONCE]
                actual, expected = ours.run(feeds, chunk), theirs.run(feeds, chunk)
                for name in chunk:
                    if not np.array_equal(actual[name], expected[name], equal_nan=True):
                        node = ours_by[name]
                        rewired, module = _rewired(node, theirs_by[name], theirs_by)
                        operator = ", which ".join(filter(None, (f"{node.op_type} {node.name}", rewired)))
                        error = _largest(actual[name], expected[name])
                        return Located(layer=module, operator=operator, input=batch.kind, error=error, allowed=0.0)
    return None


def _rewired(ours: ir.Node, theirs: ir.Node, known: Collection[str]) -> tuple[str, str]:
    """Describes the wrong value that a node reads, empty if there is none, and names the module to blame.

    If the wrong value exists in the sound graph too, the module that computes the right value is left out and is to
    blame. Otherwise it is the module of the node itself.
    """
    for actual, expected in zip(ours.inputs, theirs.inputs, strict=False):
        if actual is None or expected is None or actual.name == expected.name:
            continue
        producer = expected.producer()
        blamed = module_of(producer if producer is not None and actual.name in known else theirs)
        return f"reads {_described(actual)} in place of {_described(expected)}", blamed
    return "", module_of(theirs)


def _described(value: ir.Value) -> str:
    producer = value.producer()
    return f"{value.name} ({module_of(producer)})" if producer is not None else str(value.name)


def _largest(found: np.ndarray, expected: np.ndarray) -> float | None:
    if found.shape != expected.shape:
        return None
    with np.errstate(invalid="ignore"):
        return float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max())


def locate_by_depth(
    root: Path, engine: Engine, reference: Reference, batches: Sequence[Batch], config: BuildConfig
) -> Located | None:
    """Finds the faulty layer by silencing the layers above it.

    None if the engine contains its weights, or if these inputs do not show the fault.

    Raises:
        BuildError: the engine does not take other weights, or cannot be run.
    """
    layers = _layers(reference.model)
    if engine.weights is None or not layers:
        return None
    low, high = 0, len(layers)
    batches = next(([batch] for batch in batches if _fails(root, engine, reference, [batch], config, [])), [])
    if not batches:
        return None
    if _fails(root, engine, reference, batches, config, layers):
        where = "the model outside its layers, or the same in all of them"
        return Located(layer=where, operator=None, input=batches[0].kind, error=None, allowed=None)
    while high - low > 1:
        middle = (low + high) // 2
        if _fails(root, engine, reference, batches, config, layers[middle:]):
            high = middle
        else:
            low = middle
    return Located(layer=layers[low], operator=None, input=batches[0].kind, error=None, allowed=None)


def _fails(
    root: Path,
    engine: Engine,
    reference: Reference,
    batches: Sequence[Batch],
    config: BuildConfig,
    silenced: Sequence[str],
) -> bool:
    """Whether the engine fails with zero weights in the silenced layers. Their scores are then all equal, so they
    select the first tokens everywhere.
    """
    zeros = {
        name: np.zeros(tuple(tensor.shape), np.float32)
        for name, tensor in reference.model.weights.items()
        if (layer := numbered_layer(name)) is not None and layer[1] in silenced
    }
    gate = config.parity.gate(engine.dtype)
    with ENGINES[engine.target].load(root, engine, config, usable_cores(), zeros) as runner:
        return not judge_runner(runner, reference.with_weights(zeros), batches, gate, engine.setting).passed


def _layers(model: Model) -> list[str]:
    """Returns the module paths of the layers, in order."""
    layers = {numbered_layer(name) for name in model.weights}
    return [name for _, name in sorted(layer for layer in layers if layer is not None)]
