"""Modules, inputs and names from which an exporter makes the prefill and decode graphs of a model.

A graph needs only shapes, so the modules live on the meta device and need no memory for weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec, Site
from mod_models.step import (
    Prefill,
    Step,
    cache_layout,
    narrow_slots,
    prefill_outputs,
    sites,
    slots_of_layer,
    slots_of_step,
    step_inputs,
    step_outputs,
)
from mod_models.transformer import Transformer

META = torch.device("meta")
PART = re.compile(r"layers\.(\d+)\.(attention_norm|attention|mlp_norm|mlp|experts)\.")
"""Weights of a block that a step reads only if the block runs, unlike the router and predictor."""


@dataclass(frozen=True, slots=True)
class GraphSource:
    """The source of one graph: a module in eval mode on the meta device, two sets of inputs of equal shapes, and the
    names of inputs and outputs, in order. The graph must be the same for both sets. `conditions` tells whether the
    module has conditions on the data.
    """

    module: Transformer
    examples: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    conditions: bool


class DecodingGraphs:
    """Sources of the prefill and step graphs of a model that writes texts of up to `window` tokens."""

    def __init__(self, spec: ModelSpec, window: int, slack: int = 0) -> None:
        """The arguments are those of `generation_spec.for_generation`.

        Raises:
            GenerationError: the model cannot generate, or not in this window; the message gives the way out.
        """
        self.spec = for_generation(spec, window, slack)
        self.window = window

    @property
    def sites(self) -> tuple[Site, ...]:
        """The routing sites: the columns of `counts`, `wanted` and `ran`."""
        return sites(self.spec)

    @property
    def capacity(self) -> dict[Site, int]:
        """Routing site -> slots for the tokens of one text."""
        return self.spec.k_by_layer(self.window)

    def prefill(self, rows: int, seq: int) -> GraphSource:
        """Graph that reads prompts of up to `seq` tokens and fills a cache of that length; see `Prefill`."""
        with META:
            narrow = narrow_slots(self.spec, seq, self.window)
            module = Prefill(self.spec, seq, narrow)
            full, short = (
                (torch.zeros(rows, seq, dtype=torch.int64), torch.full((rows,), length)) for length in (seq, 1)
            )
        outputs = tuple(prefill_outputs(self.spec, seq))
        return GraphSource(_on_meta(module), (full, short), ("input_ids", "lengths"), outputs, bool(narrow))

    def step(self, rows: int, length: int, slots: str = "all", *, skip: bool = True) -> GraphSource:
        """Graph that reads one token of each row with a cache for texts of up to `length` tokens; see `Step`.

        `slots` is how many rows can run at each routing site in one step: `all`, or `fair` (`slots_of_step`).
        """
        in_step = slots_of_step(self.spec, rows, length) if slots == "fair" else None
        with META:
            module = Step(self.spec, rows, length, in_step, skip=skip)
            first, second = (
                (
                    torch.zeros(rows, dtype=torch.int64),
                    torch.full((rows,), position),
                    *(torch.zeros(entry.shape, dtype=entry.dtype) for entry in cache_layout(self.spec, rows, length)),
                )
                for position in (0, -1)
            )
        inputs, outputs = tuple(step_inputs(self.spec, length)), tuple(step_outputs(self.spec))
        return GraphSource(_on_meta(module), (first, second), inputs, outputs, skip and bool(self.sites))

    def kv_bytes(self, length: int) -> dict[int, int]:
        """Float32 bytes of one row's keys and values in each layer."""
        slot = 4 * 2 * self.spec.n_kv_heads * self.spec.d_head
        return {layer: slot * slots for layer, slots in slots_of_layer(self.spec, length).items()}

    def step_bytes(self, stored: Mapping[str, int], rows: int, length: int, executed: Mapping[Site, float]) -> int:
        """Bytes that a step has to read on average: the weights that it multiplies by, and a float32 cache.

        Args:
            stored: name of each weight of the model -> bytes that it is stored in.
            rows: texts at once.
            length: tokens that a text can have in the cache.
            executed: routing site -> share of the steps in which some row runs there.
        """
        total = 0.0
        for name, size in stored.items():
            if name == "embedding.weight" and not self.spec.tie_embeddings:
                continue  # A step reads only one row of it for each text.
            total += size * self._share(name, rows, executed)
        for layer, size in self.kv_bytes(length).items():
            site = self._site(layer, "attention")
            total += rows * size * (1.0 if site is None else executed[site])
        return round(total)

    def _share(self, name: str, rows: int, executed: Mapping[Site, float]) -> float:
        """The share of a weight that a step reads on average."""
        match = PART.match(name)
        if match is None:
            return 1.0
        site = self._site(int(match[1]), "attention" if match[2].startswith("attention") else "mlp")
        share = 1.0 if site is None else executed[site]
        experts = self.spec.experts
        if experts is not None and match[2] == "experts" and not name.endswith("router.projection.weight"):
            share *= min(1.0, rows * experts.top_k / experts.n_experts)
        return share

    def _site(self, layer: int, part: str) -> Site | None:
        """The routing site that decides whether a part of a layer runs; None if the part always runs."""
        routing = self.spec.routing
        if routing is None or layer not in self.spec.routed_layers or routing.parts not in ("block", "separate", part):
            return None
        return f"{layer}.{part}" if routing.parts == "separate" else layer


def _on_meta(module: Transformer) -> Transformer:
    return module.eval().requires_grad_(False).to("meta")
