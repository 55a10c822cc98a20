"""Finds the place where a failed candidate goes wrong: the layer, and in a graph the operator.

An ONNX file is compared with a fresh export of the same model, value by value, on the same kernels without any
optimisation. Equal graphs give equal bits, so the first value that differs is where the fault is, however small the
difference.

If both graphs are equal and wrong, the file is compared with the reference. The exporter names values after the
operations of the captured program, so values of the same name, shape and neighbours are compared. A value farther from
the float64 model than rounding explains shows where the graph goes wrong.

If the values inside an engine cannot be read, the fault is searched by depth: zero weights silence the layers above a
depth, in the engine and in the reference, and bisection finds the layer with which the fault appears.

The search for the first NaN starts at outputs that are NaN and goes back through inputs that are NaN too. A node that
returns NaN but reads none makes it. In the reference, if this node reads an infinity, the infinity's origin is found in
the same way.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx_ir as ir

from mod_export.engines.ort_session import CPU, OrtRunner, session_from_onnx
from mod_export.engines.protocol import Runner
from mod_export.environment import free_bytes
from mod_export.graph.nodes import graph_from_bytes, graph_from_file, module_of, numbered_layer
from mod_export.judge.choices import Recorder, is_float, told_of
from mod_export.judge.compare import EMPTY, ROUNDOFF, Slack
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference
from mod_export.model.model import Model
from mod_export.rows.correctness import Located
from mod_export.types import Site, routed_output

if TYPE_CHECKING:
    import torch

AT_ONCE = 64
"""Number of values held in memory at a time."""
KEPT_BYTES = 2**29
"""Size limit of the values of the reference; a model with larger values is not examined."""
N = TypeVar("N")


def locate_in_graph(root: Path, path: str, fresh: bytes, batches: Sequence[Batch]) -> Located | None:
    """Compares an ONNX file of the build folder with a fresh export, batch by batch until the values differ.

    None if both give the same bits everywhere: the fault is then not in the graph.

    Raises:
        BuildError: one of the two graphs cannot be made or run.
    """
    candidate, expected_graph = graph_from_file(root / path), graph_from_bytes(fresh)
    ours_by, theirs_by = _producers(candidate), _producers(expected_graph)
    names = [name for name in ours_by if name in theirs_by]
    with _opened(candidate, root, names) as ours, _opened(expected_graph, root, names) as theirs:
        for batch in batches:
            pairs = zip(_values(ours, batch, names), _values(theirs, batch, names), strict=True)
            for (name, actual), (_, expected) in pairs:
                if not np.array_equal(actual, expected, equal_nan=True):
                    node = ours_by[name]
                    rewired, module = _rewired(node, theirs_by[name], theirs_by)
                    operator = ", which ".join(filter(None, (f"{node.op_type} {node.name}", rewired)))
                    error = _largest(actual, expected)
                    return Located(layer=module, operator=operator, input=batch.kind, error=error, allowed=0.0)
    return None


def _rewired(ours: ir.Node, theirs: ir.Node, known: Collection[str]) -> tuple[str, str]:
    """Returns a description of the wrong value that a node reads, empty if there is none, and the module to blame.

    If the wrong value exists in the sound graph too, the wrong graph bypasses the module that computes the right value,
    so that module is to blame. Otherwise it is the module of the node itself.
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


def _largest(actual: np.ndarray, expected: np.ndarray) -> float | None:
    if actual.shape != expected.shape:
        return None
    with np.errstate(invalid="ignore"):
        return float(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max())


# Values inside a graph, as ONNX Runtime's CPU kernels compute them without any optimisation


def _producers(model: ir.Model) -> dict[str, ir.Node]:
    """Maps the name of each value whose dtype the graph states to the node that computes it."""
    return {
        value.name: node for node in model.graph for value in node.outputs if value.name and value.dtype is not None
    }


@contextlib.contextmanager
def _opened(model: ir.Model, root: Path, names: Sequence[str]) -> Iterator[OrtRunner]:
    """Opens a graph of the build folder `root` without fusion; `names` replace the outputs of `model`, in place."""
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [by_name[name] for name in names]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.onnx"
        path.write_bytes(ir.to_proto(model).SerializeToString())
        session = session_from_onnx(path, root / "graphs", [CPU], 1, {}, optimized=False)
        with OrtRunner(session, "values of a graph", 1) as runner:
            yield runner


def _values(runner: Runner, batch: Batch, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the named values of an opened graph on a batch, in their order."""
    feeds = batch.read_by(runner.inputs)
    for start in range(0, len(names), AT_ONCE):
        outputs = runner.run(feeds, names[start : start + AT_ONCE])
        yield from ((name, outputs[name]) for name in names[start : start + AT_ONCE])


# The first value that is off from the reference


def locate_against_reference(
    root: Path, path: str, reference: Reference, batches: Sequence[Batch], slack: Slack
) -> Located | None:
    """Compares an ONNX file of the build folder with the reference, batch by batch until one shows a wrong node.

    None if rounding explains all differences of values with the same name, if the first wrong value means something
    else in the program, or if memory has no room for the values.

    Raises:
        BuildError: the graph cannot be made or run.
    """
    model = graph_from_file(root / path)
    results = {str(value.name) for value in model.graph.outputs}
    by_name = {str(value.name): value for node in model.graph for value in node.outputs}
    known = _producers(model)
    program = {node.name: node for node in reference.program(batches[0].bucket).graph_module.graph.nodes}
    names = [name for name in known if name in program and _is_same_kind(by_name[name], program[name])]
    # 4 bytes in float32 and 8 in float64.
    if 12 * sum(int(program[name].meta["val"].numel()) for name in names) > min(KEPT_BYTES, free_bytes() // 8):
        return None
    sites = {site: routed_output(site) for site in reference.k_by_layer(batches[0].bucket)}
    routed = {site: name for site, name in sites.items() if name in results}
    with _opened(model, root, [*names, *(name for name in routed.values() if name not in names)]) as runner:
        for batch in batches:
            routing = _routing(runner, routed, reference, batch)
            expected, exact = Recorder([], names), Recorder([], names)
            reference.forced(batch, routing, expected)
            if reference.exact(batch, routing, exact) is None:
                return None
            for name, array in _values(runner, batch, names):
                off, allowed = _off(array, expected.values[name].numpy(), exact.values[name].numpy(), slack)
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


def _routing(runner: Runner, routed: Mapping[Site, str], reference: Reference, batch: Batch) -> dict[Site, np.ndarray]:
    """Returns the graph's selections, as far as they can be forced on the reference."""
    outputs = runner.run(batch.read_by(runner.inputs), list(routed.values())) if routed else {}
    free = reference.free(batch)
    routing = {}
    for site, name in routed.items():
        index = outputs[name].astype(np.int64)
        if index.shape == free.routed[site].shape:
            routing[site] = index.clip(EMPTY, free.judged[site].score_BS.shape[1] - 1)
    return routing


def _off(actual: np.ndarray, expected: np.ndarray, exact: np.ndarray, slack: Slack) -> tuple[float, float]:
    """Returns the largest distance of a value from float64, and the distance that rounding explains."""
    if not actual.size:
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        rounding = np.where(expected == exact, 0.0, np.abs(expected - exact))
        off = np.where(actual == exact, 0.0, np.abs(actual.astype(np.float64) - exact))
    undefined = np.isnan(exact) & np.isnan(actual)
    finite = np.abs(exact[np.isfinite(exact)])
    largest = float(finite.max()) if finite.size else 0.0
    unit = max(float(np.nan_to_num(rounding, posinf=0.0).max()), ROUNDOFF["float32"] * largest)
    return float(np.where(undefined, 0.0, off).max()), slack.units * unit


def _located(
    ours: ir.Node, theirs: torch.fx.Node, names: Sequence[str], batch: Batch, off: float, allowed: float
) -> Located | None:
    """Describes a node with a wrong value. None if its name means something else in the program: the operation of this
    name does not depend on the values that the node reads.
    """
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


# The first layer with which an engine fails


def first_faulty_layer(
    model: Model, batches: Sequence[Batch], fails: Callable[[Batch, Mapping[str, np.ndarray]], bool]
) -> Located | None:
    """Finds the layer with which a fault appears, by silencing the layers above it; None if no batch shows the fault.

    `fails` says whether the engine fails on a batch with these values in place of weights. In a layer with zero weights
    scores are all equal, so it selects the first tokens.
    """
    names = sorted({layer for name in model.weights if (layer := numbered_layer(name)) is not None})
    layers = [name for _, name in names]

    def zeros(silenced: Sequence[str]) -> dict[str, np.ndarray]:
        return {
            name: np.zeros(tuple(tensor.shape), np.float32)
            for name, tensor in model.weights.items()
            if (layer := numbered_layer(name)) is not None and layer[1] in silenced
        }

    batch = next((batch for batch in batches if layers and fails(batch, {})), None)
    if batch is None:
        return None
    if fails(batch, zeros(layers)):
        where = "the model outside its layers, or the same in all of them"
        return Located(layer=where, operator=None, input=batch.kind, error=None, allowed=None)
    low, high = 0, len(layers)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(batch, zeros(layers[middle:])) else (middle, high)
    return Located(layer=layers[low], operator=None, input=batch.kind, error=None, allowed=None)


# The first NaN


def _first_maker(
    outputs: Iterable[N], inputs_of: Callable[[N], Sequence[N]], has: Mapping[N, bool], order: Sequence[N]
) -> N | None:
    """Returns the first node, by `order`, from which a property (`has`) spreads to `outputs`: it has the property and
    reads no node that has it. None if no output has the property.
    """
    todo = [n for n in outputs if has.get(n)]
    visited, makers = set(todo), set[N]()
    while todo:
        node = todo.pop()
        before = [n for n in inputs_of(node) if has.get(n)]
        if not before:
            makers.add(node)
        todo += [n for n in before if n not in visited]
        visited.update(before)
    return next((n for n in order if n in makers), None)


class _Watch:
    """Records which operations of a run return NaN, and which return an infinity, in their order."""

    def __init__(self) -> None:
        self.nan: dict[torch.fx.Node, bool] = {}
        self.infinite: dict[torch.fx.Node, bool] = {}

    def __call__(self, node: torch.fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        parts = [part for part in (value if isinstance(value, (list, tuple)) else [value]) if is_float(part)]
        self.nan[node] = any(bool(part.isnan().any()) for part in parts)
        self.infinite[node] = any(bool(part.isinf().any()) for part in parts)
        return value


def origin_in_reference(reference: Reference, batch: Batch) -> str | None:
    """Describes the operation of the model that makes the first NaN on this batch; None if there is no NaN."""
    watch = _Watch()
    reference.forced(batch, {}, watch)
    order = list(watch.nan)

    def inputs_of(node: torch.fx.Node) -> list[torch.fx.Node]:
        return list(node.all_input_nodes)

    maker = _first_maker(inputs_of(order[-1]), inputs_of, watch.nan, order)
    if maker is None:
        return None
    source = _first_maker(inputs_of(maker), inputs_of, watch.infinite, order)
    of = "" if source is None or source.op != "call_function" else f", of an infinity that {told_of(source)} makes"
    if maker.op != "call_function":
        names = dict(zip(reference.program(batch.bucket).graph_signature.user_inputs, batch.feeds, strict=False))
        return f"{names.get(maker.name, maker.name)} holds the first{of}"
    return f"{told_of(maker)} makes the first{of}"


def origin_in_graph(root: Path, path: str, batches: Sequence[Batch]) -> Located | None:
    """Finds the node of an ONNX file of the build folder that makes the first NaN, batch by batch; None if the graph
    returns no NaN on ONNX Runtime without any optimisation.

    Raises:
        BuildError: the graph cannot be run.
    """
    model = graph_from_file(root / path)
    results = [value.producer() for value in model.graph.outputs]
    known = _producers(model)
    names, nodes = list(known), list(model.graph)
    with _opened(model, root, names) as runner:
        for batch in batches:
            has = dict.fromkeys(nodes, False)
            for name, array in _values(runner, batch, names):
                has[known[name]] |= array.dtype.kind == "f" and bool(np.isnan(array).any())
            maker = _first_maker(
                [node for node in results if node is not None], lambda node: list(node.predecessors()), has, nodes
            )
            if maker is not None:
                return Located(
                    layer=module_of(maker), operator=f"{maker.op_type} {maker.name}", input=batch.kind,
                    error=None, allowed=None, makes_nan=True,
                )  # fmt: skip
    return None
