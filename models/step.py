"""The modules of a model that writes text: `Prefill` reads some tokens of each row, and `DecodeStep` one.

Between them is the cache of the texts: keys and values of tokens, and how many slots of each routing site are in use. A
slot holds one token. If every token has a key, because attention is not routed or skipped tokens keep theirs, the slot
number is the token's position. Otherwise the n-th selected token of a row is in slot n. So the slots of a row fill from
the front, and no list of positions is needed: keys are rotated to their positions before they are stored. Unused slots
of a row hold arbitrary finite numbers.

New keys and values take part in attention beside the cached ones, and are returned as rows. The owner of the cache
writes them into their slots. A step copies no cache.

Shape legend: B rows (texts), S tokens of a prefill, T those that a layer attends to, D model width, G key/value heads,
E head width, L slots of a layer, N routing sites, or experts of a layer. `_1` is the one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mod_models.cache import expert_sites, routed_sites, sites, slots_of_layer
from mod_models.generation_spec import check_generates
from mod_models.layers import Past
from mod_models.routed_token import attended_one, decide, routed_one, transformed_one
from mod_models.routing import Continuation, Decisions
from mod_models.spec import ModelSpec, Site, layer_of
from mod_models.transformer import Block, RoutedBlock, Transformer

ROOM, MOST = 1.5, 0.75
"""The narrow slots of a routed layer suffice for ROOM times its share of the tokens, but at most for the share MOST."""


def narrow_slots(spec: ModelSpec, seq: int, window: int) -> dict[int, int]:
    """Routed layer -> narrow number of slots for a prompt of `seq` tokens, for layers that have more slots than that.

    A layer has the slots of a whole window (`spec` is from `for_generation` for this `window`), so a short prompt can
    have a slot for every token. But only about the same share runs as in the window. Layers with experts are left out.
    """
    in_window = spec.k_of_layer(window)
    # The last layer computes only one token of each row, unless attention and MLP have routers of their own.
    apart = spec.routing is not None and spec.routing.parts == "separate"
    slots = {
        layer: math.ceil(min(ROOM * in_window[layer] / window, MOST) * seq)
        for layer in spec.routed_layers
        if layer not in spec.expert_layers and (apart or layer != spec.n_layers - 1)
    }
    return {layer: n for layer, n in slots.items() if n < spec.k_of_layer(seq)[layer]}


class Prefill(Transformer):
    """The model that reads the next tokens of each row, with which a text begins or continues.

    Its shapes are static; a routed part can have a condition, which computes fewer slots if few tokens run.
    """

    def __init__(self, spec: ModelSpec, max_len: int, narrow: Mapping[int, int] | None = None) -> None:
        """Builds the module.

        Args:
            spec: from `generation_spec.for_generation`.
            max_len: number of tokens that a text can have, at most the window of the spec.
            narrow: routed layer -> a smaller number of slots that it may compute, see `RoutedBlock`; other layers
                always compute all of their slots.

        Raises:
            GenerationError: the spec is not from `for_generation`.
        """
        check_generates(spec)
        super().__init__(spec, "last")
        self.sites = sites(spec)
        self.capacity = spec.k_by_layer(max_len)
        self.site_of_cache = {layer: _site_of_cache(spec, layer) for layer in range(spec.n_layers)}
        for layer, slots in (narrow or {}).items():
            block = self.layers[layer]
            assert isinstance(block, RoutedBlock)
            block.narrow = slots

    def forward(self, ids_BS: Tensor, lengths_B: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Reads the next tokens of each row.

        Args:
            ids_BS: int64 token ids, padded on the right.
            lengths_B: int64, number of real tokens of each row, at least 1.
            state: position_B int64, the number of earlier tokens of the row, whose sum with `lengths_B` is at most
                max_len; then the cache in the order of `cache_layout`. It may have more slots, which are not in use.

        Returns:
            logits_BV of each row's last real token; for each layer keys and values (B, G, T, E) of the T tokens that it
            attends to, those of the text first; slot_BL and kept_BL int64 (B, layers), the slot of the first of these
            and how many are of the text; and in a model that routes the counts int64 (B, N) after the tokens, and
            wanted_BN int64, how many of the tokens wanted to run at each routing site. Tokens that wanted to run but
            did not run found no slot.
        """
        return self.read(ids_BS, lengths_B, state[0], state[1:], Decisions())

    def read(
        self, ids_BS: Tensor, lengths_B: Tensor, position_B: Tensor, cache: Sequence[Tensor], decisions: Decisions
    ) -> tuple[Tensor, ...]:
        """Runs `forward` and records the decisions in `decisions`."""
        count_B = {site: cache[-1][:, column] for column, site in enumerate(self.sites)}
        first_B = {layer: position_B if site is None else count_B[site] for layer, site in self.site_of_cache.items()}
        past = {layer: Past(cache[2 * layer], cache[2 * layer + 1], used_B) for layer, used_B in first_B.items()}
        decisions.before = Continuation(position_B, past, count_B, self.capacity, self.rope_cos, self.rope_sin)
        decisions.keys_values = {}
        logits_BV = self.last_logits(ids_BS, lengths_B, decisions)
        rows = [row_BGTE for layer in past for row_BGTE in decisions.keys_values[layer]]
        made = decisions.made
        kept = [lengths_B if site is None else made[site].live_BK.sum(1) for site in self.site_of_cache.values()]
        slot_BL, kept_BL = torch.stack(list(first_B.values()), 1), torch.stack(kept, 1)
        if not self.sites:
            return logits_BV, *rows, slot_BL, kept_BL
        counts_BN = cache[-1] + _columns([made[site].live_BK for site in self.sites])
        wanted_BN = _columns([made[site].chosen_BT for site in self.sites])
        return logits_BV, *rows, slot_BL, kept_BL, counts_BN, wanted_BN


def _site_of_cache(spec: ModelSpec, layer: int) -> Site | None:
    """The routing site whose tokens alone have keys in a layer; None if every token has."""
    routing, deciding = spec.routing, spec.router_of_layer.get(layer)
    if routing is None or deciding is None or routing.parts == "mlp":
        return None
    if routing.skipped_keys_values == "kept":
        return None
    return f"{layer}.attention" if routing.parts == "separate" else deciding


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


class DecodeStep(Transformer):
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
        self.router_of_layer = spec.router_of_layer
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
            cache: in the order of `cache_layout`.

        Returns:
            logits_BV; for each layer the key and the value of the token, each (B, G, E); slot_BL int64 (B, layers), the
            slots that these belong to, -1 if a row keeps nothing; and in a model that routes the counts int64 (B, N)
            after the token, wanted_BN bool, the tokens that wanted to run at each routing site, and ran_BN bool, those
            that ran. If a token wanted to run but did not, it found no slot, because its row or this step was full.
        """
        active_B1 = (position_B >= 0)[:, None]
        seen_B = position_B.clamp(min=0)
        past = {layer: (cache[2 * layer], cache[2 * layer + 1]) for layer in self.slots}
        count_B = {site: cache[-1][:, column] for column, site in enumerate(self.sites)}
        open_B1 = self._open(cache[-1], active_B1) if self.sites else {}
        run = _Run(self, active_B1, seen_B, past, count_B, open_B1)
        x_B1D = self.embedded(ids_B[:, None])
        for layer in range(self.spec.n_layers):
            block = self.block(layer)
            if self.router_of_layer.get(layer, layer) != layer:
                continue  # The block with the router has run it.
            x_B1D = run.routed(block, x_B1D) if isinstance(block, RoutedBlock) else run.dense(block, x_B1D)
        logits_BV = self.logits(self.norm(x_B1D))[:, 0]
        rows = [row for layer in self.slots for row in run.rows[layer]]
        slot_BL = torch.stack([run.slot_B[layer] for layer in self.slots], 1)
        if not self.sites:
            return logits_BV, *rows, slot_BL
        wanted_BN = torch.cat([run.wanted_B1[site] for site in self.sites], 1) & active_B1
        ran_BN = torch.cat([run.ran_B1[site] for site in self.sites], 1)
        return logits_BV, *rows, slot_BL, cache[-1] + ran_BN, wanted_BN, ran_BN

    def _open(self, count_BN: Tensor, active_B1: Tensor) -> dict[Site, Tensor]:
        """Routing site -> bool (B, 1), the rows with a token and a free slot there. Experts are left out.

        Every operator of a small step costs about two microseconds, so sites with the same number of slots share them.
        """
        capacity = {site: self.capacity[layer_of(site)] for site in self.slots_of_site}
        if len(capacity) == len(self.sites) and len(set(capacity.values())) == 1:
            open_BN = (count_BN < next(iter(capacity.values()))) & active_B1
            return dict(zip(self.sites, torch.split(open_BN, 1, dim=1), strict=True))
        columns = {site: count_BN[:, column : column + 1] for column, site in enumerate(self.sites)}
        return {site: (columns[site] < slots) & active_B1 for site, slots in capacity.items()}


@dataclass
class _Run:
    """State of one step, which the layers read and update.

    Attributes:
        step: the model.
        active_B1: bool, the rows with a token.
        seen_B: int64, how many tokens each row has read.
        past: layer -> keys and values of its cache.
        count_B: routing site -> int64 (B,), its slots in use.
        open_B1: routing site -> bool (B, 1), the rows with a token and a free slot there.
        rows: layer -> the key and the value of the token.
        slot_B: layer -> int64 (B,), the slot that these belong to, -1 if a row keeps nothing.
        wanted_B1: routing site -> bool (B, 1), the tokens that want to run. Those of rows without a token mean nothing.
        ran_B1: routing site -> bool (B, 1), the tokens that ran.
    """

    step: DecodeStep
    active_B1: Tensor
    seen_B: Tensor
    past: Mapping[int, tuple[Tensor, Tensor]]
    count_B: Mapping[Site, Tensor]
    open_B1: Mapping[Site, Tensor]
    rows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    slot_B: dict[int, Tensor] = field(default_factory=dict)
    wanted_B1: dict[Site, Tensor] = field(default_factory=dict)
    ran_B1: dict[Site, Tensor] = field(default_factory=dict)

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
        delta_B1D, marks = transformed_one(block, x_B1D, self.active_B1, self.used(block.layer))
        self.note(block.layer, marks)
        return x_B1D + delta_B1D

    def used(self, layer: int) -> Tensor | None:
        """Number of slots in use of each expert of a layer, (B, N); None without experts."""
        counts = [self.count_B[site] for site in self.step.experts[layer]]
        return torch.stack(counts, 1) if counts else None

    def note(self, layer: int, marks: tuple[Tensor, ...]) -> None:
        for column, site in enumerate(self.step.experts[layer] if marks else ()):
            self.wanted_B1[site], self.ran_B1[site] = (mark_BN[:, column : column + 1] for mark_BN in marks)

    def attended(self, block: Block, x_B1D: Tensor) -> Tensor:
        """Returns the delta of attention that every token runs."""
        past = Past(*self.past[block.layer], self.seen_B)
        delta_B1D, *rows = attended_one(block.attention, block.attention_norm(x_B1D), *self.angles, past)
        self.keep(block.layer, tuple(rows), self.active_B1, self.seen_B)
        return delta_B1D

    def routed(self, block: RoutedBlock, x_B1D: Tensor) -> Tensor:
        parts = block.routing.parts
        if parts == "block":
            return self.part(block, "block", x_B1D, x_B1D)
        after_B1D = (
            x_B1D + self.attended(block, x_B1D) if parts == "mlp" else self.part(block, "attention", x_B1D, x_B1D)
        )
        if parts == "attention":
            return self.transformed(block, after_B1D)
        return self.part(block, "mlp", after_B1D, x_B1D)

    def part(self, block: RoutedBlock, part: str, x_B1D: Tensor, block_B1D: Tensor) -> Tensor:
        """Returns the stream after a routed part; `block_B1D` is the stream that the block got."""
        site, layer = block.site(part), block.layer
        count_B, capacity = self.count_B[site], self.step.capacity[layer]
        slots = self.step.slots_of_site[site]
        candidate_B1 = None if block.previous is None else self.ran_B1[block.previous]
        decision = decide(block, part, x_B1D, block_B1D, self.seen_B, candidate_B1, self.open_B1[site], slots)
        self.wanted_B1[site], self.ran_B1[site] = decision.wanted_B1, decision.ran_B1
        after = [self.step.block(layer + n) for n in range(1, block.routing.blocks_per_router)]
        layers = [layer, *(other.layer for other in after)] if part != "mlp" else []
        pasts = [Past(*self.past[number], count_B) for number in layers]
        if layers and block.routing.skipped_keys_values == "kept":
            own = block.attention.keys_values(block.attention_norm(x_B1D), *self.angles)
            pasts = [Past(*self.past[layer], self.seen_B, *own)]
            self.keep(layer, tuple(tensor[:, :, 0] for tensor in own), self.active_B1, self.seen_B)
        angles = self.angles
        if block.routing.positions == "compact":
            # The count of a full row can be beyond the tables, but its token does not run.
            angles = self._angles(count_B.clamp(max=capacity - 1))
        used_BN = self.used(layer) if part != "attention" else None
        ran = routed_one(block, part, x_B1D, angles, pasts, decision, used_BN, after, skip=self.step.skip)
        self.note(layer, ran.experts)
        # There are no rows if the keys of skipped tokens are kept too: they are noted already.
        for number, pair in zip(layers, zip(ran.rows[::2], ran.rows[1::2], strict=True), strict=False):
            self.keep(number, pair, decision.ran_B1, count_B)
        return ran.x_B1D

    def keep(self, layer: int, rows: tuple[Tensor, ...], kept_B1: Tensor, slot_B: Tensor) -> None:
        self.rows[layer] = rows
        self.slot_B[layer] = torch.where(kept_B1.squeeze(1), slot_B, -1)
