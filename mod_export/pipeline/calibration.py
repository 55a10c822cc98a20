"""What weights are multiplied with, over text: what `graph/rounding.py` needs to round them to four bits.

The eager model reads some text, each row once for all weights that fit into memory together, and the second moments of
the rows that each weight is multiplied with are summed. Of a routed layer these are the tokens that were selected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mod_export.errors import GraphError
from mod_export.graph.routing_sites import SiteRun, run_sites
from mod_export.judge.inputs import Batch, prompts_of
from mod_export.judge.reference import tensors_of
from mod_export.model.model import sample_of, token_ids
from mod_export.model.protocol import SampledInputs
from mod_export.pipeline.build import Build
from mod_export.types import Graph, ModelKind

TOKENS = 8192
"""That are read at least."""
ROOM = 2**30
"""Bytes of second moments that are summed in one pass."""
OTHER_TEXT = 10_000
"""Between the seeds of this text and of that by which quality is judged."""


class Calibration:
    """Second moments of one model's weights, which are asked for in ascending order of their names."""

    def __init__(self, build: Build, kind: ModelKind, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` are those (N, K) of the weights that will be asked for."""
        self._build, self._kind = build, kind
        self._left = sorted(shapes)
        self._shapes = shapes
        self._found: dict[str, torch.Tensor] = {}

    def moments(self, name: str) -> torch.Tensor | None:
        """Float32 (K, K), the sum of x_i x_j over all rows x; None of a weight that no row was multiplied with.

        Raises:
            GraphError: the sums are not finite, so nothing can be rounded by them.
        """
        if name in self._left:
            self._read(self._next(name))
        found = self._found.get(name)
        if found is not None and not found.isfinite().all():
            raise GraphError(
                f"int4: {name} is multiplied with numbers that are not finite, or too large to be squared in float32, "
                "so it cannot be rounded to four bits; take int4 out of the dtypes"
            )
        return found

    def _next(self, name: str) -> list[str]:
        """This weight and those after it, as many as there is room for."""
        after = self._left[self._left.index(name) :]
        size = np.cumsum([torch.float32.itemsize * self._shapes[one][1] ** 2 for one in after])
        group = after[: max(1, int((size <= ROOM).sum()))]
        self._left = [one for one in after if one not in group]
        return group

    def _read(self, names: Sequence[str]) -> None:
        self._found = {}
        last: tuple[torch.Tensor, str] | None = None

        def watch(name: str, x: torch.Tensor) -> None:
            nonlocal last
            if name not in names:
                return
            if last is not None and last[0] is x:  # Queries, keys and values are made of the same rows.
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
        """A graph of whole rows as long as the longest prompt: what short rows hold is mostly their first tokens."""
        graphs = [one for one in self._build.graphs if one.model == self._kind and one.target is None]
        longest = max((one for one in graphs if one.role != "decode"), key=lambda one: one.bucket.seq)
        return replace(longest, role="forward", outputs=self._build.config.returned)

    def _batches(self, graph: Graph) -> Iterator[Batch]:
        build, (B, S) = self._build, (graph.bucket.batch, graph.bucket.seq)
        model, seed = build.model(self._kind), build.config.seed + OTHER_TEXT
        for number in range(-(-TOKENS // (B * S))):
            if isinstance(model, SampledInputs):
                yield Batch("sample", graph.bucket, sample_of(model, graph.bucket, seed + number))
                continue
            ids_BS = prompts_of(model, token_ids(model).vocab_size, B, S, seed + number, build.text_of)
            yield Batch.of_tokens("text", ids_BS, np.full(B, S, dtype=np.int64))
