"""Finds the first node of a graph that is off from the reference, for graphs that equal a fresh export and are wrong.

The exporter names values after the operations of the captured program. So values of the same name, shape and neighbours
are compared. A value farther from the float64 model than rounding explains shows where the graph goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from mod_export.environment import free_bytes
from mod_export.graph.nodes import graph_from_file, module_of
from mod_export.judge.checks import ROUNDOFF
from mod_export.judge.compare import EMPTY, Slack
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference
from mod_export.judge.values import AT_ONCE, opened, producers
from mod_export.rows.correctness import Located
from mod_export.types import Site, routed_output

if TYPE_CHECKING:
    import torch

KEPT_BYTES = 2**29
"""Size limit of the values of the reference; a model with larger values is not examined."""


class _Collector:
    """Keeps the values of the named operations of a run."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = set(names)
        self.found: dict[str, np.ndarray] = {}

    def __call__(self, node: torch.fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        if node.name in self._names:
            self.found[node.name] = value.detach().clone().numpy()
        return value


def locate_against_reference(
    root: Path, path: str, reference: Reference, batches: Sequence[Batch], slack: Slack
) -> Located | None:
    """Compares an ONNX file of the build folder with the reference, batch by batch until one shows a wrong node.

    None if no value that both name is off, or if memory has no room for the values.

    Raises:
        BuildError: the graph cannot be made or run.
    """
    model = graph_from_file(root / path)
    results = {str(value.name) for value in model.graph.outputs}
    by_name = {str(value.name): value for node in model.graph for value in node.outputs}
    known = producers(model)
    program = {node.name: node for node in reference.program(batches[0].bucket).graph_module.graph.nodes}
    names = [name for name in known if name in program and _is_same_kind(by_name[name], program[name])]
    if sum(_bytes(program[name]) for name in names) > min(KEPT_BYTES, free_bytes() // 8):
        return None
    sites = {site: routed_output(site) for site in reference.k_by_layer(batches[0].bucket)}
    routed = {site: name for site, name in sites.items() if name in results}
    with opened(model, root, [*names, *(name for name in routed.values() if name not in names)]) as runner:
        for batch in batches:
            feeds = batch.read_by(runner.inputs)
            routing = _routing(runner.run(feeds, list(routed.values())) if routed else {}, routed, reference, batch)
            expected, exact = _Collector(names), _Collector(names)
            reference.observed(batch, routing, expected)
            if reference.exact(batch, routing, exact) is None:
                return None
            for start in range(0, len(names), AT_ONCE):
                for name, array in runner.run(feeds, names[start : start + AT_ONCE]).items():
                    off, allowed = _off(array, expected.found[name], exact.found[name], slack)
                    if not off <= allowed:
                        return _located(known[name], program[name], names, batch, off, allowed)
    return None


def _is_same_kind(value: ir.Value, node: torch.fx.Node) -> bool:
    import torch

    expected = node.meta.get("val")
    if node.op != "call_function" or not isinstance(expected, torch.Tensor) or value.shape is None:
        return False
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return is_float and expected.is_floating_point() and tuple(expected.shape) == tuple(value.shape.dims)


def _bytes(node: torch.fx.Node) -> int:
    # 4 bytes in float32 and 8 in float64.
    return int(node.meta["val"].numel()) * 12


def _routing(
    outputs: Mapping[str, np.ndarray], routed: Mapping[Site, str], reference: Reference, batch: Batch
) -> dict[Site, np.ndarray]:
    """Returns the graph's selections, as far as they can be forced on the reference."""
    free = reference.free(batch)
    routing = {}
    for site, name in routed.items():
        index = outputs[name].astype(np.int64)
        if index.shape == free.routed[site].shape:
            routing[site] = index.clip(EMPTY, free.judged[site].score_BS.shape[1] - 1)
    return routing


def _off(found: np.ndarray, expected: np.ndarray, exact: np.ndarray, slack: Slack) -> tuple[float, float]:
    """Returns the largest distance of a value from float64, and the distance that rounding explains."""
    if not found.size:
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        rounding = np.where(expected == exact, 0.0, np.abs(expected - exact))
        off = np.where(found == exact, 0.0, np.abs(found.astype(np.float64) - exact))
    undefined = np.isnan(exact) & np.isnan(found)
    finite = np.abs(exact[np.isfinite(exact)])
    largest = float(finite.max()) if finite.size else 0.0
    unit = max(float(np.nan_to_num(rounding, posinf=0.0).max()), ROUNDOFF["float32"] * largest)
    return float(np.where(undefined, 0.0, off).max()), slack.units * unit


def _located(
    ours: ir.Node, theirs: torch.fx.Node, names: Sequence[str], batch: Batch, off: float, allowed: float
) -> Located | None:
    """Returns None if equal names mean different things: the operation does not depend on what the node reads."""
    from mod_export.judge.choices import told_of

    shared = set(names)
    above, passed = _above(theirs, lambda node: list(node.all_input_nodes), lambda node: {node.name} & shared)
    before, _ = _above(
        ours, lambda node: list(node.predecessors()), lambda node: {str(value.name) for value in node.outputs} & shared
    )
    _, behind = _above(theirs, lambda node: list(node.all_input_nodes), lambda node: ())
    nodes = {node.name: node for node in behind}
    if not before <= nodes.keys():
        return None
    missing = [node for node in passed if node.op == "call_function"]
    operator = f"{ours.op_type} {ours.name}"
    if above != before:
        unread = next((name for name in sorted(above - before)), None)
        operator += "" if unread is None else f", which does not read {told_of(nodes[unread])}"
    elif missing:
        operator += f", in front of which the graph has no value of {told_of(missing[0])}"
    return Located(layer=module_of(ours), operator=operator, input=batch.kind, error=off, allowed=allowed)


def _above(
    node: Any, inputs_of: Callable[[Any], Sequence[Any]], named: Callable[[Any], Collection[str]]
) -> tuple[set[str], list[Any]]:
    """Returns the nearest named values that a node is computed from, and the nodes in between."""
    nearest, passed, todo = set[str](), list[Any](), list(inputs_of(node))
    while todo:
        current = todo.pop(0)
        names = named(current)
        if names:
            nearest.update(names)
        elif current not in passed:
            passed.append(current)
            todo += inputs_of(current)
    return nearest, passed
