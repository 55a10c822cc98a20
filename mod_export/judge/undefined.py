"""Finds where NaN comes from: the first operation of a reference run, or the first node of a graph, that makes it.

The search starts at outputs that are NaN and goes back through inputs that are NaN too. A node that returns NaN but
reads none makes it. In the reference, if this node reads an infinity, its origin is found in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mod_export.graph.nodes import graph_from_file, module_of
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import Reference
from mod_export.judge.values import AT_ONCE, opened, producers
from mod_export.rows.correctness import Located

if TYPE_CHECKING:
    import torch

N = TypeVar("N")


def made_first(
    outputs: Iterable[N], inputs_of: Callable[[N], Sequence[N]], has: Mapping[N, bool], order: Sequence[N]
) -> N | None:
    """Returns the first node behind `outputs` that has the property and reads no node that has it; else None."""
    todo = [n for n in outputs if has.get(n)]
    seen, made = set(todo), set[N]()
    while todo:
        node = todo.pop()
        before = [n for n in inputs_of(node) if has.get(n)]
        if not before:
            made.add(node)
        todo += [n for n in before if n not in seen]
        seen.update(before)
    return next((n for n in order if n in made), None)


class _Watch:
    """Records which operations of a run return NaN, and which return an infinity."""

    def __init__(self) -> None:
        self.nan: dict[Any, bool] = {}
        self.infinite: dict[Any, bool] = {}
        self.last: Any = None

    def __call__(self, node: torch.fx.Node, compute: Callable[[], Any]) -> Any:
        value = compute()
        parts = [part for part in (value if isinstance(value, (list, tuple)) else [value]) if _is_float(part)]
        self.nan[node] = any(bool(part.isnan().any()) for part in parts)
        self.infinite[node] = any(bool(part.isinf().any()) for part in parts)
        self.last = node
        return value


def _is_float(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def origin_in_reference(reference: Reference, batch: Batch) -> str | None:
    """Describes the operation of the model that makes the first NaN on this batch; None if there is no NaN."""
    from mod_export.judge.choices import told_of

    watch = _Watch()
    reference.observed(batch, {}, watch)
    order = list(watch.nan)

    def inputs_of(node: torch.fx.Node) -> list[torch.fx.Node]:
        return list(node.all_input_nodes)

    maker = made_first(inputs_of(watch.last), inputs_of, watch.nan, order)
    if maker is None:
        return None
    source = made_first(inputs_of(maker), inputs_of, watch.infinite, order)
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
    known = producers(model)
    names, nodes = list(known), list(model.graph)
    with opened(model, root, names) as runner:
        for batch in batches:
            feeds = batch.read_by(runner.inputs)
            has = dict.fromkeys(nodes, False)
            for start in range(0, len(names), AT_ONCE):
                for name, array in runner.run(feeds, names[start : start + AT_ONCE]).items():
                    has[known[name]] |= array.dtype.kind == "f" and bool(np.isnan(array).any())
            maker = made_first(
                [node for node in results if node is not None], lambda node: list(node.predecessors()), has, nodes
            )
            if maker is not None:
                return Located(
                    layer=module_of(maker), operator=f"{maker.op_type} {maker.name}", input=batch.kind,
                    error=None, allowed=None, makes_nan=True,
                )  # fmt: skip
    return None
