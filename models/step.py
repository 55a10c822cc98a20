"""The modules of a model that writes text: `Prefill` reads some tokens of each row, and `DecodeStep` one.

Between them is the cache of the texts: keys and values of tokens, and how many slots of each routing site are in use. A
slot holds one token. If every token has a key, because attention is not routed or skipped tokens keep theirs, the slot
number is the token's position. Otherwise the n-th selected token of a row is in slot n. So the slots of a row fill from
the front, and no list of positions is needed: keys are rotated to their positions before they are stored. Unused slots
of a row hold arbitrary finite numbers.

New keys and values take part in attention beside the cached ones, and are returned as rows. The owner of the cache
writes them into their slots. A step copies no cache.

Shape legend: B rows (texts), R rows that run, S tokens of a prefill, T those that a layer attends to, D model width, G
key/value heads, M query heads of each, E head width, L slots of a layer, K = L + 1 (the slots and the token itself), N
routing sites, or experts of a layer. `_1` is the one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.cache import expert_sites, routed_sites, sites, slots_of_layer
from mod_models.experts import Experts
from mod_models.generation_spec import check_generates
from mod_models.layers import Attention, Past, either
from mod_models.routing import BLOCKS_COMBINES, COMBINES, GATES, Continuation, Decisions
from mod_models.selection import always_first, select_topk
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


EVERY_TOKEN = 2**24
"""At least as many tokens as any window has, so that `Experts.slots` gives the declared slots of an expert."""


class Ran(NamedTuple):
    """The result of a layer.

    Attributes:
        x_B1D: the stream after the layer.
        rows: the rotated key and the value of the token, each (B, G, E), for each block that the router decides about;
            empty if the part has no attention.
        experts: two bool (B, N): the experts that the token chose, and those in which it ran; empty without experts.
    """

    x_B1D: Tensor
    rows: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]


class Decision(NamedTuple):
    """The decision about each row's token.

    Attributes:
        wanted_B1: bool, the tokens that want to run.
        ran_B1: bool, those of them that found a slot in their row and in this step.
        index_R: int64, the rows in the slots of this step, ascending; None if every row has a slot.
        g_B11: the gate, in the dtype of the stream.
        normed_B1D: the part's own stream after the part's own norm, which the router reads; None if it reads another.
    """

    wanted_B1: Tensor
    ran_B1: Tensor
    index_R: Tensor | None
    g_B11: Tensor
    normed_B1D: Tensor | None


def attended_one(attention: Attention, x_B1D: Tensor, cos: Tensor, sin: Tensor, past: Past) -> tuple[Tensor, ...]:
    """Computes the attention of one token to the cached tokens and itself.

    The scores of the cache and of the token are two products that share one softmax, because concatenation would copy
    the cache. Keys are the left operand, because an ONNX product cannot transpose, and a transposed cache is a copy.

    `x_B1D` is normed; cosines and sines broadcast against (B, H, 1, E / 2).

    Returns:
        The delta of attention (B, 1, D), the rotated key and the value, each (B, G, E).
    """
    q_BH1E = attention.queries(x_B1D, cos, sin)
    k_BG1E, v_BG1E = past.key_BG1E, past.value_BG1E
    if k_BG1E is None or v_BG1E is None:
        k_BG1E, v_BG1E = attention.keys_values(x_B1D, cos, sin)
    B, G, L, E = past.keys_BGLE.shape
    q_BGEM = (q_BH1E * E**-0.5).reshape(B, G, -1, E).transpose(2, 3)
    # The scores are small, so transposing them is cheap. Mask and softmax then run along contiguous memory.
    past_BGML = (past.keys_BGLE @ q_BGEM).transpose(2, 3)
    own_BGM1 = (k_BG1E @ q_BGEM).transpose(2, 3)
    seen_BL = torch.arange(L, device=x_B1D.device) < past.count_B[:, None]
    bias_BL = torch.where(seen_BL, 0.0, float("-inf")).to(x_B1D.dtype)
    share_BGMK = torch.softmax(torch.cat((past_BGML + bias_BL[:, None, None], own_BGM1), 3), dim=3)
    y_BGME = share_BGMK[..., :L] @ past.values_BGLE + share_BGMK[..., L:] * v_BG1E
    return attention.o_proj(y_BGME.reshape(B, 1, -1)), k_BG1E.reshape(B, G, E), v_BG1E.reshape(B, G, E)


def decide(
    block: RoutedBlock,
    part: str,
    x_B1D: Tensor,
    block_B1D: Tensor,
    position_B: Tensor,
    candidate_B1: Tensor | None,
    open_B1: Tensor,
    slots: int,
) -> Decision:
    """Decides for each row's token whether it runs in a routed part.

    A token wants to run if the deciding score is above 0, as in a prompt. It can run if there is a token and its row
    has a free slot (`open_B1`). If more rows can run than this step has `slots`, those with the largest scores run,
    ties to the lower row, so that the order of the rows gives none of them an advantage. `part` is "block",
    "attention" or "mlp". `x_B1D` is the stream that the part gets and `block_B1D` the one that the block got.
    `position_B` is the position of each row's token. `candidate_B1` are the tokens that may want to run; None if all
    may.
    """
    routed_B1D, router, predictor = block.scorers(x_B1D, block_B1D, part)
    l_B1: Tensor = router(routed_B1D)
    score_B1 = l_B1
    if block.routing.selection == "predictor":
        assert predictor is not None
        score_B1 = predictor(routed_B1D)
    score_B1 = always_first(score_B1, position_B[:, None], block.routing.always_first)
    wanted_B1 = score_B1 > 0
    if candidate_B1 is not None:
        wanted_B1 = wanted_B1 & candidate_B1
    ran_B1 = wanted_B1 & open_B1
    gate_B1 = GATES[block.routing.gate](l_B1, ran_B1, block.routing)
    g_B11 = gate_B1[..., None].to(x_B1D.dtype)
    # Only the MLP of a block gets another stream than the block.
    is_own = block.routing.router_input == "normed" and (block.routing.router_stream == "part" or part != "mlp")
    normed_B1D = routed_B1D if is_own else None
    if slots >= len(ran_B1):
        return Decision(wanted_B1, ran_B1, None, g_B11, normed_B1D)
    index_1R, live_1R = select_topk(score_B1.T, ran_B1.T, slots)
    ran_B1 = torch.zeros_like(ran_B1).scatter(0, index_1R.T, live_1R.T)
    return Decision(wanted_B1, ran_B1, index_1R[0], g_B11, normed_B1D)


def transformed_one(
    block: Block, x_B1D: Tensor, active_B1: Tensor, count_BN: Tensor | None, normed_B1D: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the delta of the MLP or of the experts of a block, (B, 1, D), and `Ran.experts`.

    Only active rows choose experts. `count_BN` is the number of slots of each expert in use; None without experts.
    `normed_B1D` is the stream after the norm, if that is known.
    """
    if normed_B1D is None:
        normed_B1D = block.mlp_norm(x_B1D)
    if count_BN is None:
        return block.mlp(normed_B1D), ()
    return _experts_one(block.experts, normed_B1D, active_B1, count_BN)


def _experts_one(
    experts: Experts, x_B1D: Tensor, active_B1: Tensor, count_BN: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs only the experts that each token chose; weights of other experts are not read."""
    B, _, D = x_B1D.shape
    N, J = experts.experts.n_experts, experts.experts.top_k
    logits_B1M = experts.router(x_B1D)
    # Ties go to the first expert, as in a prompt.
    sorted_B1M, expert_B1M = torch.sort(logits_B1M, dim=-1, descending=True, stable=True)
    expert_B1J = expert_B1M[..., :J]
    weight_BJ = experts.weights(torch.softmax(logits_B1M, dim=-1), expert_B1J, sorted_B1M)[:, 0]
    expert_BJ = expert_B1J[:, 0]
    chosen_BN = (expert_BJ[..., None] == torch.arange(N, device=x_B1D.device)).any(1) & active_B1
    ran_BN = chosen_BN & (count_BN < experts.slots(EVERY_TOKEN))
    real_BJ = expert_BJ.clamp(max=N - 1)
    found_BJ = torch.gather(ran_BN, 1, real_BJ) & (expert_BJ < N)
    gate_RDF, up_RDF, down_RFD = (
        torch.index_select(weight, 0, real_BJ.reshape(-1))
        for weight in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    x_R1D = x_B1D[:, None].expand(B, J, 1, D).reshape(B * J, 1, D)
    h_R1F = experts.activation(torch.bmm(x_R1D, gate_RDF)) * torch.bmm(x_R1D, up_RDF)
    y_BJD = torch.bmm(h_R1F, down_RFD).reshape(B, J, D)
    weight_BJ = torch.where(found_BJ, weight_BJ, 0).to(x_B1D.dtype)
    return (weight_BJ[..., None] * y_BJD).sum(1, keepdim=True), (chosen_BN, ran_BN)


@dataclass(frozen=True, slots=True)
class Operands:
    """What a routed part reads: the operands of its condition.

    Attributes:
        x_B1D: the stream.
        g_B11: the gate.
        ran_B1: the rows that run.
        cos: cosines, (B, 1, 1, E / 2), and `sin` sines.
        past: the tensors of the caches, for each block 3, or 5 with the token's own key and value; none for the MLP.
        count_BN: the slots of experts in use; None without experts.
        normed_B1D: as in `Decision`.
    """

    x_B1D: Tensor
    g_B11: Tensor
    ran_B1: Tensor
    cos: Tensor
    sin: Tensor
    past: tuple[Tensor, ...]
    count_BN: Tensor | None
    normed_B1D: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in one tuple, because a condition takes nothing else."""
        further = (tensor for tensor in (self.count_BN, self.normed_B1D) if tensor is not None)
        return self.x_B1D, self.g_B11, self.ran_B1, self.cos, self.sin, *self.past, *further

    def of(self, tensors: Sequence[Tensor]) -> Operands:
        """Returns the same operands with these tensors, in the order of `tensors`."""
        rest = list(tensors[5 + len(self.past) :])
        count_BN = None if self.count_BN is None else rest.pop(0)
        normed_B1D = None if self.normed_B1D is None else rest.pop(0)
        x_B1D, g_B11, ran_B1, cos, sin = tensors[:5]
        past = tuple(tensors[5 : 5 + len(self.past)])
        return Operands(x_B1D, g_B11, ran_B1, cos, sin, past, count_BN, normed_B1D)


def routed_one(
    block: RoutedBlock,
    part: str,
    x_B1D: Tensor,
    angles: tuple[Tensor, Tensor],
    pasts: Sequence[Past],
    decision: Decision,
    count_BN: Tensor | None,
    after: Sequence[Block],
    *,
    skip: bool,
) -> Ran:
    """Runs a routed part, and the blocks `after` it that its router decides about, for the tokens that run; other
    tokens get the value of skipped ones.

    `angles` are cosines and sines, each (B, 1, 1, E / 2). `pasts` are the caches of these blocks, none for the part
    "mlp". With `skip`, a condition around the part prevents its execution if no row runs.
    """
    past = tuple(tensor for one in pasts for tensor in one if tensor is not None)
    # A key that exists already is kept for every token, and is no output of the part.
    n_rows = 2 * len(pasts) if len(past) == 3 * len(pasts) else 0
    operands = Operands(x_B1D, decision.g_B11, decision.ran_B1, *angles, past, count_BN, decision.normed_B1D)
    # With a single row and a condition, the part is executed only if that row runs: the other value is not needed.
    alone = skip and decision.index_R is None and len(x_B1D) == 1

    def left(given: Operands) -> Tensor:
        # The norm of a block, or of attention, is not that of its adapter.
        normed_B1D = given.normed_B1D if part == "mlp" else None
        return block.left(given.x_B1D, given.g_B11 if block.routing.gates_skipped else None, normed_B1D)

    def nothing(x_B1D: Tensor) -> tuple[Tensor, ...]:
        """Key and value rows of zeros, and no experts, for tokens that do not run."""
        B, n_marks = len(x_B1D), 2 if count_BN is not None else 0
        G, E = (pasts[0].keys_BGLE.shape[1], pasts[0].keys_BGLE.shape[3]) if pasts else (0, 0)
        rows = tuple(x_B1D.new_zeros(B, G, E) for _ in range(n_rows))
        N = count_BN.shape[1] if count_BN is not None else 0
        return rows + tuple(x_B1D.new_zeros(B, N, dtype=torch.bool) for _ in range(n_marks))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given, row_R = operands.of(tensors), decision.index_R
        left_B1D = None if alone else left(given)
        if row_R is None or left_B1D is None:
            return _part(block, part, after, left_B1D, given)
        inputs_R = operands.of(tuple(torch.index_select(tensor, 0, row_R) for tensor in tensors))
        outputs = _part(block, part, after, torch.index_select(left_B1D, 0, row_R), inputs_R)
        skipped_outputs = (left_B1D, *nothing(given.x_B1D))
        return tuple(into.index_put((row_R,), new) for into, new in zip(skipped_outputs, outputs, strict=True))

    def skipped(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = operands.of(tensors)
        left_B1D = left(given)
        # A branch must not return one of its inputs.
        return left_B1D.clone() if left_B1D is given.x_B1D else left_B1D, *nothing(given.x_B1D)

    tensors = operands.tensors
    new_B1D, *outputs = either(decision.ran_B1, run, skipped, tensors) if skip else run(*tensors)
    return Ran(new_B1D, tuple(outputs[:n_rows]), tuple(outputs[n_rows:]))


def _part(
    block: RoutedBlock, part: str, after: Sequence[Block], left_B1D: Tensor | None, given: Operands
) -> tuple[Tensor, ...]:
    """Returns the fields of `Ran` in one tuple. Rows that do not run get `left_B1D`; with None, all rows run."""
    x_B1D, g_B11, ran_B1, normed_B1D = given.x_B1D, given.g_B11, given.ran_B1, given.normed_B1D

    def chosen(new_B1D: Tensor) -> Tensor:
        return new_B1D if left_B1D is None else torch.where(ran_B1[..., None], new_B1D, left_B1D)

    if after:
        y_B1D, rows_of_blocks = _through((block, *after), x_B1D, given.cos, given.sin, given.past)
        return chosen(BLOCKS_COMBINES[block.routing.combine](x_B1D, y_B1D, g_B11)), *rows_of_blocks
    attention_B1D = mlp_B1D = None
    rows: tuple[Tensor, ...] = ()
    marks: tuple[Tensor, ...] = ()
    after_B1D = x_B1D
    if given.past:
        past = Past(*given.past)
        if normed_B1D is None:
            normed_B1D = block.attention_norm(x_B1D)
        attention_B1D, *rows_of_two = attended_one(block.attention, normed_B1D, given.cos, given.sin, past)
        rows = tuple(rows_of_two) if past.key_BG1E is None else ()
        after_B1D, normed_B1D = x_B1D + attention_B1D, None
    if part != "attention":
        mlp_B1D, marks = transformed_one(block, after_B1D, ran_B1, given.count_BN, normed_B1D)
    return chosen(COMBINES[block.routing.combine](x_B1D, attention_B1D, mlp_B1D, g_B11)), *rows, *marks


def _through(
    blocks: Sequence[Block], x_B1D: Tensor, cos: Tensor, sin: Tensor, past_tensors: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the stream after these blocks, and the key and the value of the token in each, (B, G, E)."""
    rows = []
    for number, block in enumerate(blocks):
        past = Past(*past_tensors[3 * number : 3 * number + 3])
        delta_B1D, *rows_of_two = attended_one(block.attention, block.attention_norm(x_B1D), cos, sin, past)
        x_B1D = x_B1D + delta_B1D
        x_B1D = x_B1D + block.mlp(block.mlp_norm(x_B1D))
        rows += rows_of_two
    return x_B1D, rows


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
