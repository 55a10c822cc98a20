"""Captures a model as one graph of static shape: torch.compile proves that it is one, and torch.export exports it.

Models without values are built on the meta device, but not captured there: torch gives tensors other strides there than
on the CPU (attention returns another layout), and `view` depends on strides. So capture replaces tensors on the meta
device by torch's fake tensors of the CPU, which have no values and take no memory either.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mod_export.errors import CaptureError
from mod_export.graph.find_sites import mark_found_sites
from mod_export.graph.narrow_program import NARROW, narrowed
from mod_export.graph.refusals import refusal, refuse_dynamic
from mod_export.graph.sites import RoutingSite, name_sites, routing_sites, with_routed_outputs
from mod_export.types import DType, routed_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TORCH = torch.__path__[0] + os.sep
ALLOCATIONS = 20_000
"""Number of new Python objects after which objects in cycles are searched for during capture and export; Python's own
is 700 (2,000 since 3.13). Tracing makes millions of objects, and the search took an eighth of the time of a build.
"""
_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Context or decorator in which Python searches for objects in cycles less often, see ALLOCATIONS."""
    before = gc.get_threshold()
    # A threshold of 0 turns the search off, and stays.
    gc.set_threshold(before[0] and max(before[0], ALLOCATIONS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureProof:
    """How torch.compile captured different inputs of one bucket."""

    graphs: int
    graph_breaks: int
    recompiles: int


@seldom_collected()
def prove_static(module: torch.nn.Module, examples: Sequence[Sequence[torch.Tensor]], where: str) -> CaptureProof:
    """Proves that a module is one static graph: it compiles without breaks, and runs other inputs without a recompile.

    The backend runs graphs eagerly, because breaks and recompiles happen before any backend is called.

    Args:
        module: the module to capture.
        examples: inputs of equal shapes and different values.
        where: the name of the module in messages.

    Raises:
        CaptureError: the model does not compile as one static graph, or fails by itself; `refusals.py` says why.
    """
    graphs: list[torch.fx.Graph] = []

    def keep(graph_module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph_module.graph)
        has_values = not any(isinstance(tensor, FakeTensor) for tensor in _inputs)
        return graph_module.forward if has_values else _shapes_only(graph_module)

    torch._dynamo.reset()
    # fullgraph=True turns a graph break into an exception; the counters are read as well, so that the proof does not
    # rest on one flag.
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=keep)
    placed = examples[0]
    try:
        with (
            torch.no_grad(),
            _on_the_cpu(module, examples) as placed_examples,
            torch._dynamo.config.patch(error_on_recompile=True),
            without_dumps(),
        ):
            for placed in placed_examples:
                compiled(*placed)
    except Exception as error:  # From torch, or from the model, which runs during capture.
        raise refusal(error, module, placed, where) from error
    finally:
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        torch._dynamo.reset()
    proof = CaptureProof(graphs=len(graphs), graph_breaks=breaks, recompiles=len(graphs) - 1)
    if proof != CaptureProof(graphs=1, graph_breaks=0, recompiles=0):
        raise CaptureError(f"{where}: expected 1 graph, no breaks and no recompiles, got {proof}")
    # torch.compile allows dynamic sizes in one graph, but a graph of fixed sizes cannot hold them.
    refuse_dynamic(graphs[0], where)
    return proof


def _shapes_only(graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that returns results without values, because inputs without values cannot run the graph."""
    outputs = graph_module.graph.output_node().args[0]

    def forward(*_inputs: torch.Tensor) -> Any:
        return torch.fx.map_arg(outputs, lambda node: torch.empty_like(node.meta["example_value"], device="meta"))

    return forward


@contextlib.contextmanager
def _on_the_cpu(
    module: torch.nn.Module, examples: Sequence[Sequence[torch.Tensor]]
) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Context in which the tensors of a module on the meta device are fake tensors of the CPU; it yields examples that
    are such tensors. A module on another device, and its examples, stay as they are.
    """
    state = {part: (dict(part._parameters), dict(part._buffers)) for part in module.modules()}
    tensors = [*module.parameters(), *module.buffers(), *(tensor for example in examples for tensor in example)]
    if not any(tensor.is_meta for tensor in tensors):
        yield [tuple(example) for example in examples]
        return
    mode = FakeTensorMode()
    fakes: dict[torch.Tensor, torch.Tensor] = {}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[tensor] = torch.nn.Parameter(empty, requires_grad=False) if is_parameter else empty
        return fakes[tensor]

    try:
        for part, (parameters, buffers) in state.items():
            part._parameters.update((name, placed(value)) for name, value in parameters.items() if value is not None)  # type: ignore[misc]  # It is one.
            part._buffers.update((name, placed(value)) for name, value in buffers.items() if value is not None)
        yield [tuple(map(placed, example)) for example in examples]
    finally:
        for part, (parameters, buffers) in state.items():
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@dataclass(frozen=True, slots=True)
class Captured:
    """An exported program without markers, whose last outputs are the selections of the routing sites `sites`."""

    program: torch.export.ExportedProgram
    sites: tuple[RoutingSite, ...]

    @property
    def routed(self) -> list[str]:
        """The names of the outputs that hold these selections."""
        return [routed_output(site.name) for site in self.sites]


def captured(
    module: torch.nn.Module,
    example: Sequence[torch.Tensor],
    where: str,
    *,
    strict: bool = False,
    dtype: DType = "float32",
) -> Captured:
    """The `exported` program in the form that engines are built from: products in `dtype`, and markers erased."""
    program = exported(module, example, where, strict=strict)
    if dtype in NARROW:
        program = narrowed(program, dtype)
    return Captured(with_routed_outputs(program), tuple(routing_sites(program)))


@seldom_collected()
def exported(
    module: torch.nn.Module, example: Sequence[torch.Tensor], where: str, *, strict: bool = False
) -> torch.export.ExportedProgram:
    """Exports a module for inputs with the shapes of `example`, which must be different tensors.

    Markers of routing sites stay, and those without a name get one. If the model has no markers, its sites are found.

    With `strict`, conditions are captured with everything else. Without it, each of them is compiled by itself, which
    takes longer than everything else.

    Raises:
        CaptureError: torch.export refused the model, or the program has sizes that depend on the data.
    """
    # torch takes a repeated tensor for one input, and the graph is silently wrong.
    assert len({id(tensor) for tensor in example}) == len(example)
    try:
        with torch.no_grad(), _on_the_cpu(module, [example]) as (placed,), without_dumps():
            program = torch.export.export(module, placed, strict=strict)
    except Exception as error:  # From torch, or from the model, which runs during capture.
        raise refusal(error, module, example, where) from error
    refuse_dynamic(program.graph, where)
    return with_found_sites(program)


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """Hides what torch writes to the terminal before it raises: tracebacks, and the whole graph so far."""
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_no_record)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            yield
    finally:
        for name in _TALKATIVE:
            logging.getLogger(name).removeFilter(_no_record)
    sys.stderr.write(written.getvalue())


@contextlib.contextmanager
def lines_of_helpers() -> Iterator[None]:
    """Makes nodes keep the lines of the functions that `forward` calls; torch only keeps the lines of `forward`."""

    def own_frames(_tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((n for n, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(
            [frame for frame in frames[first:] if not frame.filename.startswith(_TORCH)]
        )

    before = fx.proxy.TracerBase._filter_traceback_frames
    fx.proxy.TracerBase._filter_traceback_frames = own_frames  # type: ignore[method-assign,assignment]  # It is made to be replaced.
    try:
        yield
    finally:
        fx.proxy.TracerBase._filter_traceback_frames = before  # type: ignore[method-assign]  # As above.


def _no_record(_record: logging.LogRecord) -> bool:
    return False


def with_found_sites(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with a named marker at each routing site: the model's own markers, or else those of found sites."""
    if routing_sites(program):
        name_sites(program)
    else:
        mark_found_sites(program)
    return program
