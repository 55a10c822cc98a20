"""What an exporter needs to make graphs of a model that generates: modules without values, their inputs and names.

Only shapes matter to a graph, so the modules live on the meta device, and nothing here costs the memory of weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mod_models.cache import cache_layout, sites, slots_of_layer
from mod_models.generation_spec import for_generation
from mod_models.spec import ModelSpec, Site
from mod_models.step import Prefill, Step, narrow_slots, prefill_outputs, slots_of_step, step_inputs, step_outputs
from mod_models.transformer import Transformer

META = torch.device("meta")
PART = re.compile(r"layers\.(\d+)\.(attention_norm|attention|mlp_norm|mlp|experts)\.")
"""What a routed block consists of; its router and predictor are read in every step."""


@dataclass(frozen=True, slots=True)
class GraphSource:
    """What one graph is made of: a module in eval mode on the meta device, two sets of inputs of equal shapes, and the
    names of inputs and outputs, in order. The graph must be the same for both sets. `conditions` says whether parts of
    the module stand in conditions.
    """

    module: Transformer
    examples: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    conditions: bool


class DecodingGraphs:
    """Prompts and steps of a model that writes texts of up to `window` tokens."""

    def __init__(self, spec: ModelSpec, window: int, slack: int = 0) -> None:
        """See `generation_spec.for_generation` for the arguments.

        Raises:
            GenerationError: the model cannot generate, or not in this window; with the way out.
        """
        self.spec = for_generation(spec, window, slack)
        self.window = window

    @property
    def sites(self) -> tuple[Site, ...]:
        """The routing sites: the columns of `counts`, `wanted` and `ran`."""
        return sites(self.spec)

    @property
    def capacity(self) -> dict[Site, int]:
        """How many tokens of a text each of them takes."""
        return self.spec.k_by_layer(self.window)

    def prefill(self, rows: int, seq: int) -> GraphSource:
        """Prompts of up to `seq` tokens, and a cache for so many; see `Prefill` for inputs and outputs."""
        with META:
            narrow = narrow_slots(self.spec, seq, self.window)
            module = Prefill(self.spec, seq, narrow)
            full, short = (
                (torch.zeros(rows, seq, dtype=torch.int64), torch.full((rows,), length)) for length in (seq, 1)
            )
        outputs = tuple(prefill_outputs(self.spec, seq))
        return GraphSource(_on_meta(module), (full, short), ("input_ids", "lengths"), outputs, bool(narrow))

    def step(self, rows: int, length: int, slots: str = "all", *, skip: bool = True) -> GraphSource:
        """One token of each row on a cache of texts of up to `length` tokens; see `Step` for inputs and outputs.

        `slots` says how many rows of a step can run at each routing site: `all`, or `fair`, see `slots_of_step`.
        """
        in_step = slots_of_step(self.spec, rows, length) if slots == "fair" else None
        with META:
            module = Step(self.spec, rows, length, in_step, skip=skip)
            first, second = (
                (
                    torch.zeros(rows, dtype=torch.int64),
                    torch.full((rows,), position),
                    *(torch.zeros(one.shape, dtype=one.dtype) for one in cache_layout(self.spec, rows, length)),
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
        """Bytes that a step has to read: weights that it multiplies by, and the slots of the cache, in float32.

        Args:
            stored: name of each weight of the model -> bytes that it is stored in.
            rows: texts at once.
            length: of the cache.
            executed: routing site -> share of the steps in which some row runs there.
        """
        total = 0.0
        for name, size in stored.items():
            if name == "embedding.weight" and not self.spec.tie_embeddings:
                continue  # One row of it.
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
        """The routing site that decides whether a part of a layer runs; None where it always does."""
        routing = self.spec.routing
        if routing is None or layer not in self.spec.routed_layers or routing.parts not in ("block", "separate", part):
            return None
        return f"{layer}.{part}" if routing.parts == "separate" else layer


def _on_meta(module: Transformer) -> Transformer:
    return module.eval().requires_grad_(False).to("meta")
