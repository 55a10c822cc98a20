"""One token of each row in one part of a block: the decision, the part for the rows that run, and what the others get.

Shape legend: B rows (texts), R rows that run, D model width, G key/value heads, M query heads of each, E head width, L
slots of a layer, K = L + 1 (the slots and the token itself), N experts of a layer, J those of a token, F their width.
`_1` is the one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.experts import Experts
from mod_models.layers import Attention, Past, either
from mod_models.routing import BLOCKS_COMBINES, COMBINES, GATES
from mod_models.selection import always_first, select_topk
from mod_models.transformer import Block, RoutedBlock

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
