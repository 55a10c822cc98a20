"""Second moments of the inputs of each weight over text, with which `graph/rounding.py` rounds weights to four bits.

The eager model reads some text, once for each group of weights whose moments fit into memory together, and sums the
second moments of the rows that each weight is multiplied with. In a routed layer these are the selected tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mod_export.errors import GraphError
from mod_export.graph.sites import SiteRun, run_sites
from mod_export.judge.inputs import Batch, prompts_of
from mod_export.judge.reference import tensors_of
from mod_export.pipeline.build import Build
from mod_export.pipeline.roles import ROLES
from mod_export.types import Graph, ModelKind

TOKENS = 8192
"""Least number of tokens that are read."""
ROOM = 2**30
"""Largest size in bytes of the second moments that are summed in one pass over the text."""
OTHER_TEXT = 10_000
"""Offset from the seed of the text by which quality is judged, so that the two texts differ."""


class Calibration:
    """Second moments of the inputs of one model's weights, which must be asked for in ascending order of names."""

    def __init__(self, build: Build, kind: ModelKind, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` gives the shape (N, K) of each weight that will be asked for."""
        self._build, self._kind = build, kind
        self._left = sorted(shapes)
        self._shapes = shapes
        self._found: dict[str, torch.Tensor] = {}

    def moments(self, name: str) -> torch.Tensor | None:
        """Returns the float32 (K, K) sum of x_i x_j over all rows x; None if no row was multiplied with the weight.

        Raises:
            GraphError: the sums are not finite, so nothing can be rounded by them.
        """
        if name in self._left:
            self._read(self._next(name))
        moments_KK = self._found.get(name)
        if moments_KK is not None and not moments_KK.isfinite().all():
            raise GraphError(
                f"int4: {name} is multiplied with numbers that are not finite, or too large to be squared in float32, "
                "so it cannot be rounded to four bits; take int4 out of the dtypes"
            )
        return moments_KK

    def _next(self, name: str) -> list[str]:
        """Takes this weight and as many after it as there is room for."""
        after = self._left[self._left.index(name) :]
        size = np.cumsum([torch.float32.itemsize * self._shapes[weight][1] ** 2 for weight in after])
        group = after[: max(1, int((size <= ROOM).sum()))]
        self._left = [weight for weight in after if weight not in group]
        return group

    def _read(self, names: Sequence[str]) -> None:
        self._found = {}
        last: tuple[torch.Tensor, str] | None = None

        def watch(name: str, x: torch.Tensor) -> None:
            nonlocal last
            if name not in names:
                return
            if last is not None and last[0] is x:  # Query, key and value projections read the same rows.
                self._found[name] = self._found[last[1]]
                return
            last = (x, name)
            rows_NK = x.reshape(-1, x.shape[-1]).float()
            moments_KK = self._found.setdefault(name, torch.zeros(2 * x.shape[-1:]))
            moments_KK.addmm_(rows_NK.T, rows_NK)

        graph = self._longest()
        program = self._build.program(graph, "float32")
        for batch in self._batches(graph):
            run_sites(program, program.state_dict, tensors_of(batch.feeds), SiteRun(graph.bucket.seq), watch=watch)
            last = None

    def _longest(self) -> Graph:
        """Returns the longest graph of rows or prompts as a forward graph: short rows hold only beginnings of texts."""
        graphs = [graph for graph in self._build.graphs if graph.model == self._kind and graph.target is None]
        reading = [graph for graph in graphs if ROLES[graph.role].reads_several_tokens]
        longest = max(reading, key=lambda graph: graph.bucket.seq)
        return replace(longest, role="forward", outputs=self._build.config.returned)

    def _batches(self, graph: Graph) -> Iterator[Batch]:
        build, (B, S) = self._build, (graph.bucket.batch, graph.bucket.seq)
        model, seed = build.model(self._kind), build.config.seed + OTHER_TEXT
        for number in range(-(-TOKENS // (B * S))):
            if model.tokens is None:
                yield Batch("sample", graph.bucket, model.sample(graph.bucket, seed + number))
                continue
            ids_BS = prompts_of(model, model.tokens.vocab_size, B, S, seed + number, build.text_of)
            yield Batch.of_tokens("text", ids_BS, np.full(B, S, dtype=np.int64))
