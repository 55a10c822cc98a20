"""Captures a model as one graph of static shape: proven whole by torch.compile, then exported by torch.export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mod_export.artifacts import Bucket
from mod_export.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CaptureProof", "exported_from_module", "prove_static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureProof:
    """What torch.compile did with two different inputs of one bucket."""

    graphs: int
    graph_breaks: int
    recompiles: int


def _example(bucket: Bucket, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids_BS = torch.full((bucket.batch, bucket.seq), fill, dtype=torch.int64)
    # A row may be full, short, or down to one token; none of it may change the graph.
    lengths_B = torch.full((bucket.batch,), bucket.seq if fill == 0 else 1, dtype=torch.int64)
    return ids_BS, lengths_B


def prove_static(module: torch.nn.Module, bucket: Bucket, name: str) -> CaptureProof:
    """Compiles with `fullgraph=True` and runs two different inputs: one graph, no break, no recompile.

    The backend is `eager`, because breaks and recompiles happen before any backend is asked.

    Raises:
        CaptureError: the model does not compile as one static graph.
    """
    compiled_graphs = 0

    def count(graph_module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph_module.forward

    torch._dynamo.reset()
    # fullgraph=True turns a graph break into an exception; the counters are read as well, so that the proof does not
    # rest on one flag.
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=count)
    try:
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            compiled(*_example(bucket, 0))
            compiled(*_example(bucket, 1))
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(
            f"{name} at {bucket.name}: torch.compile(fullgraph=True) could not capture one static graph: {reason}. "
            "Routing must use a fixed k and gather/scatter, without boolean indexing or .item()"
        ) from error
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    proof = CaptureProof(graphs=compiled_graphs, graph_breaks=breaks, recompiles=compiled_graphs - 1)
    torch._dynamo.reset()
    if proof != CaptureProof(graphs=1, graph_breaks=0, recompiles=0):
        raise CaptureError(f"{name} at {bucket.name}: expected 1 graph, no breaks and no recompiles, got {proof}")
    return proof


def exported_from_module(module: torch.nn.Module, bucket: Bucket, name: str) -> torch.export.ExportedProgram:
    """torch.export of one bucket, every dimension static.

    Raises:
        CaptureError: torch.export refused the model.
    """
    try:
        with torch.no_grad():
            return torch.export.export(module, _example(bucket, 0))
    except (torch._dynamo.exc.TorchDynamoException, torch._export.verifier.SpecViolationError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CaptureError(f"{name} at {bucket.name}: torch.export refused the model: {reason}") from error
