"""Decoding of one token of each row in one layer, with the cached keys and values of earlier tokens.

Shape legend: B rows, R rows that run, D model width, G key/value heads, M query heads of each, E head width,
L slots of a layer, K = L + 1 (the slots and the token itself). `_1` is the one token.

Nothing here copies a cache. The new key and value take part in attention beside the cached ones, and are returned as
rows (B, G, E). The owner of the cache writes them into their slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mod_models.conditions import either
from mod_models.experts import Experts
from mod_models.layers import Attention
from mod_models.routing import COMBINES, GATES
from mod_models.selection import always_first, select_topk
from mod_models.transformer import Block, RoutedBlock

EVERY_TOKEN = 2**24
"""At least as many tokens as any window has, so that `Experts.slots` gives the declared slots of an expert."""


class Past(NamedTuple):
    """The cache of one layer, and the number of its slots in use in each row.

    Attributes:
        keys_BGLE: rotated keys.
        values_BGLE: values.
        count_B: int64, how many leading slots hold a token.
    """

    keys_BGLE: Tensor
    values_BGLE: Tensor
    count_B: Tensor

    def of(self, row_R: Tensor) -> Past:
        """Returns the cache of these rows only."""
        return Past(*(torch.index_select(tensor, 0, row_R) for tensor in self))


class Ran(NamedTuple):
    """The result of a layer.

    Attributes:
        x_B1D: the stream after the layer.
        rows: the rotated key and the value of the token, each (B, G, E); empty if the part has no attention.
        experts: two bool (B, N): the experts that the token chose, and those in which it ran; empty without experts.
    """

    x_B1D: Tensor
    rows: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]


class Decision(NamedTuple):
    """The decision about each row's token.

    Attributes:
        wanted_B: bool, the tokens that want to run.
        ran_B: bool, those of them that found a slot in their row and in this step.
        index_R: int64, the rows in the slots of this step, ascending; None if every row has a slot.
        g_B11: the gate, in the dtype of the stream.
    """

    wanted_B: Tensor
    ran_B: Tensor
    index_R: Tensor | None
    g_B11: Tensor


def attended_one(attention: Attention, x_B1D: Tensor, cos: Tensor, sin: Tensor, past: Past) -> tuple[Tensor, ...]:
    """Computes the attention of one token to the cached tokens and itself.

    The scores of the cache and of the token are two products that share one softmax, because concatenation would copy
    the cache. Keys are the left operand, because an ONNX product cannot transpose, and a transposed cache is a copy.

    `x_B1D` is normed; cosines and sines broadcast against (B, H, 1, E / 2).

    Returns:
        The delta of attention (B, 1, D), the rotated key and the value, each (B, G, E).
    """
    q_BH1E, k_BG1E, v_BG1E = attention.projected(x_B1D, cos, sin)
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
    block: RoutedBlock, part: str, x_B1D: Tensor, position_B: Tensor, active_B: Tensor, free_B: Tensor, slots: int
) -> Decision:
    """Decides for each row's token whether it runs in a routed part.

    A token wants to run if the deciding score is above 0, as in a prompt. It can run if its row has a free slot
    (`free_B`). If more rows can run than this step has `slots`, those with the largest scores run, ties to the lower
    row, so that the order of the rows gives none of them an advantage. `part` is "block", "attention" or "mlp".
    `position_B` is the position of each row's token; `active_B` is False for rows without a token.
    """
    routed_B1D, router, predictor = block.scorers(x_B1D, part)
    l_B1: Tensor = router(routed_B1D)
    score_B1 = l_B1
    if block.routing.selection == "predictor":
        assert predictor is not None
        score_B1 = predictor(routed_B1D)
    score_B1 = always_first(score_B1, position_B[:, None], block.routing.always_first)
    wanted_B = (score_B1[:, 0] > 0) & active_B
    ran_B = wanted_B & free_B
    gate_B1 = GATES[block.routing.gate](l_B1, ran_B[:, None], block.routing)
    g_B11 = gate_B1[..., None].to(x_B1D.dtype)
    if slots >= len(ran_B):
        return Decision(wanted_B, ran_B, None, g_B11)
    index_1R, live_1R = select_topk(score_B1.T, ran_B[None], slots)
    ran_B = torch.zeros_like(ran_B).scatter(0, index_1R[0], live_1R[0])
    return Decision(wanted_B, ran_B, index_1R[0], g_B11)


def transformed_one(
    block: Block, x_B1D: Tensor, active_B: Tensor, count_BN: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the delta of the MLP or of the experts of a block, (B, 1, D), and `Ran.experts`.

    Only active rows choose experts. `count_BN` is the number of slots of each expert in use; None without experts.
    """
    normed_B1D = block.mlp_norm(x_B1D)
    if count_BN is None:
        return block.mlp(normed_B1D), ()
    return _experts_one(block.experts, normed_B1D, active_B, count_BN)


def _experts_one(
    experts: Experts, x_B1D: Tensor, active_B: Tensor, count_BN: Tensor
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
    chosen_BN = (expert_BJ[..., None] == torch.arange(N, device=x_B1D.device)).any(1) & active_B[:, None]
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


def routed_one(
    block: RoutedBlock,
    part: str,
    x_B1D: Tensor,
    angles: tuple[Tensor, Tensor],
    past: Past | None,
    decision: Decision,
    count_BN: Tensor | None,
    *,
    skip: bool,
) -> Ran:
    """Runs a routed part for the tokens that run; the stream of other tokens does not change, bit for bit.

    `angles` are cosines and sines, each (B, 1, 1, E / 2); `past` is None for the part "mlp". With `skip`, a condition
    around the part prevents its execution if no row runs.
    """

    def nothing(x_B1D: Tensor) -> tuple[Tensor, ...]:
        """Key and value rows of zeros, and no experts, for tokens that do not run."""
        B, n_rows, n_marks = len(x_B1D), 2 if past is not None else 0, 2 if count_BN is not None else 0
        G, E = (past.keys_BGLE.shape[1], past.keys_BGLE.shape[3]) if past is not None else (0, 0)
        rows = tuple(x_B1D.new_zeros(B, G, E) for _ in range(n_rows))
        N = count_BN.shape[1] if count_BN is not None else 0
        return rows + tuple(x_B1D.new_zeros(B, N, dtype=torch.bool) for _ in range(n_marks))

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        row_R = decision.index_R
        if row_R is None:
            return _part(block, part, given, has_past=past is not None)
        inputs_R = tuple(torch.index_select(tensor, 0, row_R) for tensor in given)
        outputs = _part(block, part, inputs_R, has_past=past is not None)
        skipped_outputs = (given[0], *nothing(given[0]))
        return tuple(into.index_put((row_R,), new) for into, new in zip(skipped_outputs, outputs, strict=True))

    def skipped(*given: Tensor) -> tuple[Tensor, ...]:
        # A branch must not return one of its inputs.
        return given[0].clone(), *nothing(given[0])

    given = (x_B1D, *angles, decision.ran_B, decision.g_B11, *(past or ()), *(() if count_BN is None else (count_BN,)))
    new_B1D, *outputs = either(decision.ran_B, run, skipped, given) if skip else run(*given)
    n_rows = 0 if past is None else 2
    return Ran(new_B1D, tuple(outputs[:n_rows]), tuple(outputs[n_rows:]))


def _part(block: RoutedBlock, part: str, given: tuple[Tensor, ...], *, has_past: bool) -> tuple[Tensor, ...]:
    """Returns the fields of `Ran` in one tuple; rows that do not run keep their stream."""
    x_B1D, cos, sin, ran_B, g_B11, *others = given
    attention_B1D = mlp_B1D = None
    rows: tuple[Tensor, ...] = ()
    marks: tuple[Tensor, ...] = ()
    after_B1D = x_B1D
    if has_past:
        past = Past(*others[:3])
        attention_B1D, *rows_of_two = attended_one(block.attention, block.attention_norm(x_B1D), cos, sin, past)
        rows = tuple(rows_of_two)
        after_B1D = x_B1D + attention_B1D
    if part != "attention":
        count_BN = others[-1] if len(others) % 3 else None
        mlp_B1D, marks = transformed_one(block, after_B1D, ran_B, count_BN)
    new_B1D = COMBINES[block.routing.combine](x_B1D, attention_B1D, mlp_B1D, g_B11)
    return torch.where(ran_B[:, None, None], new_B1D, x_B1D), *rows, *marks
