"""Rounds weights to four bits by what they are multiplied with in text (`graph/rounding.py`).

The eager model reads several batches of text at once, and stops before each product with a weight. There the second
moments of the rows of all batches are summed, the weight is rounded, and the product is taken with the rounded weight:
so later weights make up for the errors of earlier ones (GPTQ does this block by block: arXiv 2210.17323, section 5).
The text is read once, whatever the number of layers, and memory holds the moments of one weight. In a routed layer the
rows are the selected tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.export import ExportedProgram

from mod_export.errors import GraphError
from mod_export.graph.rounding import Rounded, represented, rounded
from mod_export.graph.sites import SiteRun, linears_of, stops_at_linears
from mod_export.judge.inputs import Batch
from mod_export.judge.reference import tensors_of
from mod_export.judge.text import prompts_of
from mod_export.pipeline.build import Build
from mod_export.pipeline.roles import ROLES
from mod_export.types import Graph, ModelKind

TOKENS = 8192
"""Least number of tokens that are read."""
OTHER_TEXT = 10_000
"""Offset from the seed of the text by which quality is judged, so that the two texts differ."""


def in_four_bits(build: Build, kind: ModelKind, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Rounded]]:
    """Returns `rounded_over` text for these weights of a model.

    Raises:
        GraphError: a weight is multiplied with numbers that are not finite, so nothing can be rounded by them.
    """
    graph = _longest(build, kind)
    inputs = [tensors_of(batch.feeds) for batch in _batches(build, kind, graph)]
    return rounded_over(build.program(graph, "float32"), inputs, graph.bucket.seq, weights)


def rounded_over(
    program: ExportedProgram, inputs: Sequence[Sequence[torch.Tensor]], seq: int, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Rounded]]:
    """Yields each of these weights (N, K) once, in the order of their last products; then those that nothing is
    multiplied with, rounded to the nearest integers.

    Args:
        program: captured on the CPU.
        inputs: inputs of as many runs.
        seq: the row length of the program.
        weights: weights of the program by name.

    Raises:
        GraphError: a weight is multiplied with numbers that are not finite.
    """
    products_left = Counter(name for name in linears_of(program).values() if name in weights)
    sums: dict[str, torch.Tensor] = {}
    read: Sequence[torch.Tensor] = ()
    stands_for: dict[str, torch.Tensor] = {}

    def convert(name: str, weight: torch.Tensor) -> torch.Tensor:
        return stands_for.get(name, weight)

    runs = [stops_at_linears(program, program.state_dict, each, SiteRun(seq), convert=convert) for each in inputs]
    for stops in zip(*runs, strict=True):
        stands_for.clear()
        name = stops[0][0]
        if name not in products_left:
            continue
        rows = [x for _, x in stops]
        # Query, key and value projections read the same rows.
        if not read or any(x is not before for x, before in zip(rows, read, strict=True)):
            moments_KK, read = _summed(rows), rows
        sums[name] = sums[name] + moments_KK if name in sums else moments_KK
        products_left[name] -= 1
        if products_left[name] == 0:
            result = rounded(weights[name].detach(), "int4", _finite(sums.pop(name), name))
            stands_for[name] = represented(result, weights[name].shape[1])
            yield name, result
    for name in sorted(weights.keys() - products_left.keys()):
        yield name, rounded(weights[name].detach(), "int4")


def _summed(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    moments_KK = torch.zeros(2 * rows[0].shape[-1:])
    for x in rows:
        rows_NK = x.reshape(-1, x.shape[-1]).float()
        moments_KK.addmm_(rows_NK.T, rows_NK)
    return moments_KK


def _finite(moments_KK: torch.Tensor, name: str) -> torch.Tensor:
    if not moments_KK.isfinite().all():
        raise GraphError(
            f"int4: {name} is multiplied with numbers that are not finite, or too large to be squared in float32, "
            "so it cannot be rounded to four bits; take int4 out of the dtypes"
        )
    return moments_KK


def _longest(build: Build, kind: ModelKind) -> Graph:
    """Returns the longest graph of rows or prompts as a forward graph: short rows hold only beginnings of texts."""
    graphs = [graph for graph in build.graphs if graph.model == kind and graph.target is None]
    reading = [graph for graph in graphs if ROLES[graph.role].reads_several_tokens]
    longest = max(reading, key=lambda graph: graph.bucket.seq)
    return replace(longest, role="forward", outputs=build.config.returned)


def _batches(build: Build, kind: ModelKind, graph: Graph) -> Iterator[Batch]:
    B, S = graph.bucket.batch, graph.bucket.seq
    model, seed = build.model(kind), build.config.seed + OTHER_TEXT
    for number in range(-(-TOKENS // (B * S))):
        if model.tokens is None:
            yield Batch("sample", graph.bucket, model.sample(graph.bucket, seed + number))
            continue
        ids_BS = prompts_of(model, model.tokens.vocab_size, B, S, seed + number, build.text_source)
        yield Batch.of_tokens("text", ids_BS, np.full(B, S, dtype=np.int64))
