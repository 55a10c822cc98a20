"""Mixture of experts instead of an MLP, with static shapes: every expert has a fixed number of slots.

Shape legend: B batch, T tokens that the block is given, D model width, F expert width, N experts, M experts and no-op
experts, C slots of an expert, J experts of a token, R = N * B * C rows of all slots.

TensorRT does not take a scatter with a reduction, so there is none. With token choice, each token gathers the rows of
its J experts. With expert choice, any number of experts can choose a token, so experts are added to the stream one
after the other; the rows that one expert writes are all different.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mod_models.fixed_capacity import select_chosen
from mod_models.layers import ACTIVATIONS
from mod_models.routing import Decisions, ExpertRouterInputs, linear_float32
from mod_models.selection import FIRST_COME, RANK, Rule, Tokens, select_topk, selected_at
from mod_models.spec import ExpertsSpec, ModelSpec, expert_site

SMALLEST = 2.0**-126
"""Smallest score of a chosen expert. Chosen experts need a score above 0, even if another expert has the same logit."""


class ExpertRouter(nn.Module):
    """Computes the logits of the experts and, after them, of the no-op experts: (B, T, D) -> float32 (B, T, M)."""

    def __init__(self, d_model: int, n_choices: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d_model, n_choices, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return linear_float32(self.projection, x_BTD)


class Experts(nn.Module):
    """Computes the delta of the experts for each token, (B, T, D), with batched products over all experts."""

    def __init__(self, spec: ModelSpec, layer: int, experts: ExpertsSpec) -> None:
        super().__init__()
        d_model, d_ff = spec.d_model, spec.d_ff
        self.slots = partial(spec.expert_slots, layer)
        self.layer = layer
        self.experts = experts
        self.activation = ACTIVATIONS[spec.activation]
        self.router = ExpertRouter(d_model, experts.n_experts + experts.noop_experts)
        # Weights are stored for x @ W, because a batched product cannot transpose its operand.
        self.gate_proj = nn.Parameter(torch.empty(experts.n_experts, d_model, d_ff))
        self.up_proj = nn.Parameter(torch.empty(experts.n_experts, d_model, d_ff))
        self.down_proj = nn.Parameter(torch.empty(experts.n_experts, d_ff, d_model))

    def forward(self, x_BTD: Tensor, tokens: Tokens, decisions: Decisions) -> Tensor:
        """Adds a site "<layer>.expert<e>" for each expert to `decisions`."""
        return EXPERT_CHOICES[self.experts.choice](self, x_BTD, tokens, decisions)

    def run(self, x_BTD: Tensor, index_BNC: Tensor) -> Tensor:
        """Runs the gated MLP of each expert on the tokens in its slots: (N, B * C, D)."""
        B, T, D = x_BTD.shape
        row_R = (index_BNC + T * torch.arange(B, device=x_BTD.device)[:, None, None]).transpose(0, 1).reshape(-1)
        x_NCD = torch.index_select(x_BTD.reshape(B * T, D), 0, row_R).reshape(self.experts.n_experts, -1, D)
        h_NCF = self.activation(torch.bmm(x_NCD, self.gate_proj)) * torch.bmm(x_NCD, self.up_proj)
        return torch.bmm(h_NCF, self.down_proj)

    def weights(self, probability_BTM: Tensor, expert_BTJ: Tensor, sorted_BTM: Tensor) -> Tensor:
        """The weights of a token's experts, (B, T, J); `sorted_BTM` are its logits, the largest first."""
        weight_BTJ = torch.gather(probability_BTM, 2, expert_BTJ)
        if self.experts.top_k == 1:
            return weight_BTJ
        chosen_BTJ = torch.softmax(sorted_BTM, dim=-1)[..., : self.experts.top_k]
        return weight_BTJ / chosen_BTJ.sum(-1, keepdim=True)

    def selected(
        self, tokens: Tokens, decisions: Decisions, selection: tuple[Tensor, Tensor], score_BNT: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        """Marks each expert's selection (index_BNC, live_BNC) as a routing site."""
        sites = [expert_site(self.layer, e) for e in range(self.experts.n_experts)]
        return selected_at(sites, tokens, decisions, *selection, score_BNT, rule)


def _margins(logits_BTM: Tensor, sorted_BTM: Tensor, chosen_BTM: Tensor, top_k: int) -> Tensor:
    """Returns the margin of each expert. That of a chosen one is its logit minus the largest logit not chosen (> 0);
    that of any other is its logit minus the smallest chosen logit (<= 0).
    """
    last, next_ = sorted_BTM[..., top_k - 1 : top_k], sorted_BTM[..., top_k : top_k + 1]
    return torch.where(chosen_BTM, (logits_BTM - next_).clamp(min=SMALLEST), logits_BTM - last)


def _token_choice(self: Experts, x_BTD: Tensor, tokens: Tokens, decisions: Decisions) -> Tensor:
    """Sends each token to its J most probable experts; the slots of an expert fill in the order of the sequence.

    The router's softmax includes no-op experts. For J > 1 a token's weights are divided by their sum over its J
    choices, even those where it found no slot, so the weights do not depend on other tokens.
    """
    N, J = self.experts.n_experts, self.experts.top_k
    B, T, D = x_BTD.shape
    C = self.slots(T)
    logits_BTM = self.router(x_BTD)
    probability_BTM = torch.softmax(logits_BTM, dim=-1)
    # Ties go to the first expert, as in every selection.
    sorted_BTM, expert_BTM = torch.sort(logits_BTM, dim=-1, descending=True, stable=True)
    numbers_M = torch.arange(logits_BTM.shape[-1], device=x_BTD.device)
    chosen_BTM = (expert_BTM[..., :J, None] == numbers_M).any(-2)
    chosen_BNT = (chosen_BTM[..., :N] & tokens.live_BT[..., None]).transpose(1, 2)
    score_BNT = _margins(logits_BTM, sorted_BTM, chosen_BTM, J)[..., :N].transpose(1, 2)
    index_BNC, live_BNC = select_chosen(chosen_BNT, C)
    if decisions.before is not None:
        free_BN = torch.stack([decisions.before.free_B(expert_site(self.layer, e)) for e in range(N)], 1)
        live_BNC = live_BNC & (torch.arange(C, device=x_BTD.device) < free_BN[..., None])
    index_BNC, live_BNC = self.selected(tokens, decisions, (index_BNC, live_BNC), score_BNT, FIRST_COME)
    decisions.experts[self.layer] = ExpertRouterInputs(probability_BTM, expert_BTM[..., 0], tokens.live_BT)

    y_RD = self.run(x_BTD, index_BNC).reshape(-1, D)
    slot_BTN = _slots(index_BNC, live_BNC, T).transpose(1, 2)
    # Experts that have a slot for the token come first, sorted by descending probability.
    ranked_BTN = torch.where(slot_BTN < C, logits_BTM[..., :N], float("-inf"))
    expert_BTJ = torch.sort(ranked_BTN, dim=-1, descending=True, stable=True).indices[..., :J]
    slot_BTJ = torch.gather(slot_BTN, 2, expert_BTJ)
    found_BTJ = slot_BTJ < C
    row = torch.arange(B, device=x_BTD.device)[:, None, None]
    row_BTJ = torch.where(found_BTJ, (expert_BTJ * B + row) * C + slot_BTJ, 0)
    weight_BTJ = torch.where(found_BTJ, self.weights(probability_BTM, expert_BTJ, sorted_BTM), 0).to(x_BTD.dtype)
    y_BTJD = torch.index_select(y_RD, 0, row_BTJ.reshape(-1)).reshape(B, T, -1, D)
    return (weight_BTJ[..., None] * y_BTJD).sum(2)


def _slots(index_BNC: Tensor, live_BNC: Tensor, T: int) -> Tensor:
    """The slot in which each expert holds each token, int64 (B, N, T); C if there is none."""
    B, N, C = index_BNC.shape
    row_R = (index_BNC + T * torch.arange(B * N, device=index_BNC.device).reshape(B, N, 1)).reshape(-1)
    slot_R = torch.where(live_BNC, torch.arange(C, device=index_BNC.device), C).reshape(-1)
    no_slot = torch.full((B * N * T,), C, dtype=torch.int64, device=index_BNC.device)
    return no_slot.index_put((row_R,), slot_R).reshape(B, N, T)


def _expert_choice(self: Experts, x_BTD: Tensor, tokens: Tokens, decisions: Decisions) -> Tensor:
    """Gives each expert the C tokens of a row with its largest probabilities; the softmax includes no-op experts."""
    N = self.experts.n_experts
    B, T, D = x_BTD.shape
    C = self.slots(T)
    share_BNT = torch.softmax(self.router(x_BTD), dim=-1)[..., :N].transpose(1, 2)
    live_BNT = tokens.live_BT[:, None, :].expand(B, N, T)
    index_BNC, live_BNC = self.selected(tokens, decisions, select_topk(share_BNT, live_BNT, C), share_BNT, RANK)
    weight_BNC = torch.where(live_BNC, torch.gather(share_BNT, 2, index_BNC), 0).to(x_BTD.dtype)
    y_NCD = self.run(x_BTD, index_BNC) * weight_BNC.transpose(0, 1).reshape(N, B * C, 1)
    row_BNC = index_BNC + T * torch.arange(B, device=x_BTD.device)[:, None, None]
    sum_RD = torch.zeros(B * T, D, dtype=x_BTD.dtype, device=x_BTD.device)
    for e in range(N):
        row_C = row_BNC[:, e].reshape(-1)
        sum_RD = sum_RD.index_put((row_C,), torch.index_select(sum_RD, 0, row_C) + y_NCD[e])
    return sum_RD.reshape(B, T, D)


EXPERT_CHOICES: dict[str, Callable[[Experts, Tensor, Tokens, Decisions], Tensor]] = {
    "token": _token_choice,
    "expert": _expert_choice,
}
"""Choice name -> (experts, their normed input x_BTD, the block's tokens, decisions) -> their delta (B, T, D)."""
