"""The two modules of a model that writes text: `Prefill` reads prompts, and `Step` reads one more token of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mod_models.cache import cache_layout, expert_sites, routed_sites, sites, slots_of_layer
from mod_models.generation_spec import check_generates
from mod_models.one_token import Past, attended_one, decide, routed_one, transformed_one
from mod_models.routing import Decisions
from mod_models.spec import ModelSpec, Site, layer_of
from mod_models.transformer import OUTPUTS, Block, RoutedBlock, Transformer


def prefill_outputs(spec: ModelSpec, max_len: int) -> list[str]:
    """Names of the outputs of `Prefill`, in order."""
    names = ["last_logits", *(tensor.name for tensor in cache_layout(spec, 1, max_len))]
    return names + (["wanted"] if sites(spec) else [])


ROOM, MOST = 1.5, 0.75
"""A routed layer has narrow slots for ROOM times its share of the tokens, but at most for the share MOST of them."""


def narrow_slots(spec: ModelSpec, seq: int, window: int) -> dict[int, int]:
    """Routed layer -> narrow number of slots for a prompt of `seq` tokens, for layers that have more slots than that.

    A layer has the slots of a whole window (`spec` is from `for_generation` for this `window`), so a short prompt can
    have a slot for every token. But only about the same share runs as in the window. Layers with experts are left out.
    """
    in_window = spec.k_of_layer(window)
    slots = {
        layer: math.ceil(min(ROOM * in_window[layer] / window, MOST) * seq)
        for layer in spec.routed_layers
        if layer not in spec.expert_layers
    }
    return {layer: n for layer, n in slots.items() if n < spec.k_of_layer(seq)[layer]}


class Prefill(Transformer):
    """The model that reads the prompts of a bucket. Its shapes are static; a routed part can have a condition, which
    computes fewer slots if few tokens run.
    """

    def __init__(self, spec: ModelSpec, max_len: int, narrow: Mapping[int, int] | None = None) -> None:
        """Builds the module.

        Args:
            spec: from `generation_spec.for_generation`.
            max_len: tokens of a text in the cache that it fills, at least as many as in the bucket.
            narrow: routed layer -> a smaller number of slots that it may compute, see `RoutedBlock`; other layers
                always compute all of their slots.

        Raises:
            GenerationError: the spec is not from `for_generation`.
        """
        check_generates(spec)
        super().__init__(spec, "last")
        self.slots = slots_of_layer(spec, max_len)
        for layer, slots in (narrow or {}).items():
            block = self.layers[layer]
            assert isinstance(block, RoutedBlock)
            block.narrow = slots

    def forward(self, ids_BS: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        """Reads the prompt of each row.

        Args:
            ids_BS: int64 token ids, padded on the right.
            lengths_B: int64, number of real tokens of each row, at least 1.

        Returns:
            logits_BV of each row's last real token; the tensors of the cache in the order of `cache.cache_layout`;
            and in a model that routes wanted_BN int64, the number of tokens that wanted to run at each routing site.
            Those beyond the `counts` of the cache found no slot and were skipped.
        """
        return self.read(ids_BS, lengths_B, Decisions())

    def read(self, ids_BS: Tensor, lengths_B: Tensor, decisions: Decisions) -> tuple[Tensor, ...]:
        """Runs `forward` and records the decisions in `decisions`."""
        decisions.keys_values = {}
        logits_BV = OUTPUTS["last"](self, self.stream(ids_BS, lengths_B, decisions), lengths_B)
        cache = []
        for layer, slots in self.slots.items():
            for part_BGTE in decisions.keys_values[layer]:
                # Slots after a row's count hold padding, skipped tokens or zeros; no token attends to them.
                cache.append(functional.pad(part_BGTE, (0, 0, 0, slots - part_BGTE.shape[2])))
        routed = [decisions.made[site] for site in sites(self.spec)]
        if not routed:
            return logits_BV, *cache
        counts_BN = _columns([routing.live_BK for routing in routed])
        wanted_BN = _columns([routing.chosen_BT for routing in routed])
        return logits_BV, *cache, counts_BN, wanted_BN


def _columns(marks: list[Tensor]) -> Tensor:
    """Counts the marks of each of the N tensors in each row: int64 (B, N)."""
    return torch.stack([mark.sum(1) for mark in marks], 1)


def slots_of_step(spec: ModelSpec, rows: int, max_len: int) -> dict[Site, int]:
    """Routing site -> a fair share of the rows: as many as run on average when a text fills its slots.

    In some steps more rows want to run by chance. The surplus is skipped, although a prefill would have selected those
    tokens. So a step with fewer slots than rows has a fixed amount of work, but does not always agree with the prefill.
    """
    slots = spec.k_of_layer(max_len)
    return {site: max(1, math.ceil(rows * slots[layer_of(site)] / max_len)) for site in routed_sites(spec)}


def step_inputs(spec: ModelSpec, max_len: int) -> list[str]:
    """Names of the inputs of `Step`, in order."""
    return ["input_ids", "positions", *(tensor.name for tensor in cache_layout(spec, 1, max_len))]


def step_outputs(spec: ModelSpec) -> list[str]:
    """Names of the outputs of `Step`, in order."""
    rows = [f"{part}_row_{layer}" for layer in range(spec.n_layers) for part in ("keys", "values")]
    return ["logits", *rows, "slots", *(["new_counts", "wanted", "ran"] if sites(spec) else [])]


class Step(Transformer):
    """The model that reads one token of each row, for a decode bucket. Shapes are static; routed parts have conditions.

    With one row, a routed part that skips the token is not executed. With more rows, a part has a fixed number of slots
    for rows, and is not executed if it skips all rows.
    """

    def __init__(
        self, spec: ModelSpec, rows: int, max_len: int, slots: Mapping[Site, int] | None = None, *, skip: bool = True
    ) -> None:
        """Builds the module.

        Args:
            spec: from `generation_spec.for_generation`.
            rows: number of texts at once.
            max_len: number of tokens that a text can have, at most the window of the spec.
            slots: routing site -> rows that it can select in a step, from 1 to `rows`; by default all rows, so that
                every step decides like a prefill. See `slots_of_step`.
            skip: whether routed parts have conditions.

        Raises:
            GenerationError: the spec is not from `for_generation`.
            ValueError: a number of slots is out of range, or the model does not have the site.
        """
        check_generates(spec)
        super().__init__(spec)
        self.slots = slots_of_layer(spec, max_len)
        self.sites = sites(spec)
        self.capacity = spec.k_of_layer(max_len)
        routed = routed_sites(spec)
        self.slots_of_site: dict[Site, int] = dict.fromkeys(routed, rows) | dict(slots or {})
        self.experts = {layer: expert_sites(spec, layer) for layer in range(spec.n_layers)}
        self.skip = skip
        wrong = [f"{site}={k}" for site, k in self.slots_of_site.items() if site not in routed or not 1 <= k <= rows]
        if wrong:
            known = ", ".join(map(str, routed))
            raise ValueError(f"slots: expected 1 to {rows} for sites among {known}, got {', '.join(wrong)}")

    def forward(self, ids_B: Tensor, position_B: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """Reads one token of each row.

        Args:
            ids_B: int64 token ids.
            position_B: int64, number of earlier tokens of the row, less than max_len; negative for a row without a
                token, which uses no slot and adds nothing to the cache; its logits have no meaning.
            cache: in the order of `cache.cache_layout`.

        Returns:
            logits_BV; for each layer the key and the value of the token, each (B, G, E); slot_BL int64 (B, layers), the
            slots that these belong to, -1 if a row keeps nothing; and in a model that routes the counts int64 (B, N)
            after the token, wanted_BN bool, the tokens that wanted to run at each routing site, and ran_BN bool, those
            that ran. A token that wanted to run but did not found no slot: its row was full, or this step was.
        """
        active_B = position_B >= 0
        seen_B = position_B.clamp(min=0)
        past = {layer: (cache[2 * layer], cache[2 * layer + 1]) for layer in self.slots}
        count_B = {site: cache[-1][:, column] for column, site in enumerate(self.sites)}
        run = _Run(self, active_B, seen_B, past, count_B)
        x_B1D = self.embedded(ids_B[:, None])
        for block in self.layers:
            assert isinstance(block, Block)
            x_B1D = run.routed(block, x_B1D) if isinstance(block, RoutedBlock) else run.dense(block, x_B1D)
        logits_BV = self.logits(self.norm(x_B1D))[:, 0]
        rows = [row for layer in self.slots for row in run.rows[layer]]
        slot_BL = torch.stack([run.slot_B[layer] for layer in self.slots], 1)
        if not self.sites:
            return logits_BV, *rows, slot_BL
        wanted_BN = torch.stack([run.wanted_B[site] for site in self.sites], 1)
        ran_BN = torch.stack([run.ran_B[site] for site in self.sites], 1)
        return logits_BV, *rows, slot_BL, cache[-1] + ran_BN, wanted_BN, ran_BN


@dataclass
class _Run:
    """State of one step, which the layers read and update."""

    step: Step
    active_B: Tensor
    seen_B: Tensor
    past: Mapping[int, tuple[Tensor, Tensor]]
    count_B: Mapping[Site, Tensor]
    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    slot_B: dict[int, Tensor] = field(default_factory=dict)
    wanted_B: dict[Site, Tensor] = field(default_factory=dict)
    ran_B: dict[Site, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.angles = self._angles(self.seen_B)

    def _angles(self, position_B: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of one position in each row, each (B, 1, 1, E / 2)."""
        cos_BE = torch.index_select(self.step.rope_cos, 0, position_B)
        sin_BE = torch.index_select(self.step.rope_sin, 0, position_B)
        return cos_BE[:, None, None], sin_BE[:, None, None]

    def dense(self, block: Block, x_B1D: Tensor) -> Tensor:
        return self.transformed(block, x_B1D + self.attended(block, x_B1D))

    def transformed(self, block: Block, x_B1D: Tensor) -> Tensor:
        """Returns the stream after an MLP, or experts, that every token runs."""
        delta_B1D, marks = transformed_one(block, x_B1D, self.active_B, self.used(block.layer))
        self.note(block.layer, marks)
        return x_B1D + delta_B1D

    def used(self, layer: int) -> Tensor | None:
        """Number of slots in use of each expert of a layer, (B, N); None without experts."""
        counts = [self.count_B[site] for site in self.step.experts[layer]]
        return torch.stack(counts, 1) if counts else None

    def note(self, layer: int, marks: tuple[Tensor, ...]) -> None:
        for column, site in enumerate(self.step.experts[layer] if marks else ()):
            self.wanted_B[site], self.ran_B[site] = marks[0][:, column], marks[1][:, column]

    def attended(self, block: Block, x_B1D: Tensor) -> Tensor:
        """Returns the delta of attention that every token runs."""
        past = Past(*self.past[block.layer], self.seen_B)
        delta_B1D, *rows = attended_one(block.attention, block.attention_norm(x_B1D), *self.angles, past)
        self.keep(block.layer, tuple(rows), self.active_B, self.seen_B)
        return delta_B1D

    def routed(self, block: RoutedBlock, x_B1D: Tensor) -> Tensor:
        parts = block.routing.parts
        if parts == "block":
            return self.part(block, "block", x_B1D)
        after_B1D = x_B1D + self.attended(block, x_B1D) if parts == "mlp" else self.part(block, "attention", x_B1D)
        if parts == "attention":
            return self.transformed(block, after_B1D)
        return self.part(block, "mlp", after_B1D)

    def part(self, block: RoutedBlock, part: str, x_B1D: Tensor) -> Tensor:
        site, layer = block.site(part), block.layer
        count_B, capacity = self.count_B[site], self.step.capacity[layer]
        decision = decide(
            block, part, x_B1D, self.seen_B, self.active_B, count_B < capacity, self.step.slots_of_site[site]
        )
        self.wanted_B[site], self.ran_B[site] = decision.wanted_B, decision.ran_B
        past = Past(*self.past[layer], count_B) if part != "mlp" else None
        angles = self.angles
        if block.routing.positions == "compact":
            # The count of a full row can be beyond the tables, but its token does not run.
            angles = self._angles(count_B.clamp(max=capacity - 1))
        used_BN = self.used(layer) if part != "attention" else None
        ran = routed_one(block, part, x_B1D, angles, past, decision, used_BN, skip=self.step.skip)
        self.note(layer, ran.experts)
        if ran.rows:
            self.keep(layer, ran.rows, decision.ran_B, count_B)
        return ran.x_B1D

    def keep(self, layer: int, rows: tuple[Tensor, ...], kept_B: Tensor, slot_B: Tensor) -> None:
        self.rows[layer] = rows
        self.slot_B[layer] = torch.where(kept_B, slot_B, -1)
