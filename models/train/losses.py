"""The losses that a training step minimizes: next-token cross entropy, and auxiliary losses for routing.

Top-k needs the whole row, so generation, one token at a time, needs another decision. The paper (Raposo et al.,
arXiv 2404.02258, section 3.5) gives two ways, and both are here. An auxiliary predictor on stop-gradient inputs learns
which tokens top-k selects. Or a binary cross entropy on the router's own outputs centres the scores, so that "l > 0"
means "selected"; its gradient reaches the router and the stream.

The next-token loss never holds the logits of all tokens at once. 512 tokens with a vocabulary of 49,152 have 100 MB of
logits, and a plain cross entropy keeps several copies of them for its backward pass. Here the head runs on one chunk of
tokens at a time. The gradients of the hidden states and of the head are computed together with the loss (as in Liger,
Hsu et al., arXiv 2410.10989).

Shape legend: N tokens of a batch, C tokens of a chunk, B rows, T tokens that a block is given, D model width,
V vocabulary, M experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mod_models.routing import Decisions, ExpertRouterInputs, RouterInputs, Routing
from mod_models.selection import FIRST_COME, Tokens, always_first, select_topk
from mod_models.spec import Site, is_expert
from mod_models.train import TrainConfig
from mod_models.transformer import RoutedBlock, Transformer

DEFAULTS = TrainConfig()
CHUNK_ELEMENTS = 2**24
"""Number of logits in memory at once, 64 MiB in float32."""


class Teacher(NamedTuple):
    """The model to distil from: its hidden states (N, D) and its head (V, D), without gradients."""

    hidden_ND: Tensor
    head_VD: Tensor


class NextToken(NamedTuple):
    """The losses of N tokens, float32 scalars.

    Attributes:
        objective: `cross_entropy + distill * divergence`, with a gradient.
        cross_entropy: mean cross entropy of the next tokens in nats, without a gradient.
        divergence: KL(teacher || model), mean in nats, without a gradient; 0 without a teacher.
    """

    objective: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def next_token_loss(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, teacher: Teacher | None = None, distill: float = 0.0
) -> NextToken:
    """Computes the cross entropy of the targets, int64 (N,), and the divergence from the teacher if there is one.

    Under autocast, products with the head run in the autocast dtype; softmax and sums are at least float32.
    """
    learning = torch.is_grad_enabled()
    outputs = _InChunks.apply(hidden_ND, head_VD, target_N, teacher, distill, learning)  # type: ignore[no-untyped-call]
    return NextToken(*outputs)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, teacher: Teacher | None, distill: float,
        learning: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        wanted = [needed and learning for needed in ctx.needs_input_grad[:2]]
        d_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
        d_head_VD = torch.zeros_like(head_VD) if wanted[1] else None
        nats = torch.zeros(2, dtype=exact, device=hidden_ND.device)
        step, tokens = max(1, CHUNK_ELEMENTS // len(head_VD)), len(hidden_ND)
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            log_p_CV = torch.log_softmax(functional.linear(hidden_ND[part], head_VD).to(exact), -1)
            target_C1 = target_N[part, None]
            nats[0] -= log_p_CV.gather(1, target_C1).sum()
            p_teacher_CV = None
            if teacher is not None:
                log_t_CV = torch.log_softmax(functional.linear(teacher.hidden_ND[part], teacher.head_VD).to(exact), -1)
                p_teacher_CV = log_t_CV.exp()
                nats[1] += (p_teacher_CV * log_t_CV.sub_(log_p_CV)).sum()
            if any(wanted):
                # Gradients of the means: cross entropy p - onehot(target), divergence p - p_teacher.
                d_logits_CV = log_p_CV.exp_().mul_(1 + distill if p_teacher_CV is not None else 1)
                d_logits_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1, dtype=exact))
                if p_teacher_CV is not None:
                    d_logits_CV.sub_(p_teacher_CV, alpha=distill)
                d_logits_CV /= tokens
                if d_hidden_ND is not None:
                    d_hidden_ND[part] = torch.matmul(d_logits_CV, head_VD)
                if d_head_VD is not None:
                    d_head_VD += torch.matmul(d_logits_CV.T, hidden_ND[part])
        cross_entropy, divergence = nats / max(1, tokens)
        ctx.save_for_backward(*(gradient for gradient in (d_hidden_ND, d_head_VD) if gradient is not None))
        ctx.wanted = wanted
        ctx.mark_non_differentiable(cross_entropy, divergence)
        return cross_entropy + distill * divergence, cross_entropy, divergence

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        gradients = [saved.pop(0) * d_outputs[0] if wanted else None for wanted in ctx.wanted]
        return (*gradients, None, None, None, None)


class Losses(NamedTuple):
    """The losses of some rows.

    Attributes:
        total: float32 scalar with a gradient: `next_token` and the weighted other losses.
        next_token: float32 scalar, mean cross entropy of the next token in nats; it has a gradient of its own unless
            there is a teacher.
        metrics: name -> number, for the losses and sites that apply: `predictor_loss`, `router_loss` (nats) and
            `balance_loss`, summed over layers, and `distill_loss` (nats), all before weighting;
            `predictor_accuracy/<site>` and `router_accuracy/<site>`, share of the positions where the sign of the
            logit is right about the top-k selection; `tokens_run/<site>`, share of the tokens that ran, and
            `overflow/<site>`, share of the tokens that wanted to run but found no slot.
    """

    total: Tensor
    next_token: Tensor
    metrics: dict[str, float]


def losses(
    model: Transformer, ids_BS1: Tensor, config: TrainConfig = DEFAULTS, teacher: Transformer | None = None
) -> Losses:
    """Runs one forward pass and returns its losses. Every loss is a mean over rows and positions, so the mean over two
    halves of a batch is the loss of the batch.

    Args:
        model: float32, on the device of `ids_BS1`.
        ids_BS1: int64 (B, S + 1) token ids, without padding. The model reads the first S and predicts the last S.
        config: gives the weights of the other losses; a loss of weight 0 gets no gradient at all.
        teacher: the model to distil from, with the same vocabulary. Its activations are freed layer by layer.
    """
    ids_BS, target_BS = ids_BS1[:, :-1], ids_BS1[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1], device=ids_BS.device)
    decisions = Decisions()
    teacher_states = None
    if teacher is not None:
        with torch.no_grad():
            teacher_states = Teacher(teacher.hidden(ids_BS, lengths_B, Decisions()).flatten(0, 1), teacher.head_weight)
    hidden_ND = model.hidden(ids_BS, lengths_B, decisions).flatten(0, 1)
    head = next_token_loss(hidden_ND, model.head_weight, target_BS.flatten(), teacher_states, config.distill)
    auxiliary: dict[str, list[Tensor]] = {"predictor": [], "router": [], "balance": []}
    metrics: dict[str, Tensor] = {}
    for site, router_inputs in decisions.seen.items():
        selected_BT = _membership(router_inputs)
        if router_inputs.predictor is not None:
            logit_BT = router_inputs.predictor(router_inputs.x_BTD.detach())
            auxiliary["predictor"].append(_cross_entropy(logit_BT, selected_BT, router_inputs.live_BT))
            metrics[f"predictor_accuracy/{site}"] = _agreement(logit_BT, selected_BT, router_inputs.live_BT)
        if config.router_loss > 0:
            # The metric exists only with this loss: without it the sign of a score has no meaning.
            auxiliary["router"].append(_cross_entropy(router_inputs.l_BT, selected_BT, router_inputs.live_BT))
            metrics[f"router_accuracy/{site}"] = _agreement(router_inputs.l_BT, selected_BT, router_inputs.live_BT)
    auxiliary["balance"] = [_balance(router_inputs) for router_inputs in decisions.experts.values()]
    metrics |= _slots(model, decisions.made)
    total = head.objective
    if teacher is not None:
        metrics["distill_loss"] = head.divergence
    for name, by_layer in auxiliary.items():
        if by_layer:
            loss = torch.stack(by_layer).sum()
            metrics[f"{name}_loss"] = loss
            # `0 * loss` would give gradients of zero, and the optimizer would still decay the untrained weights.
            weight = getattr(config, f"{name}_loss")
            total = total + weight * loss if weight > 0 else total
    return Losses(total, head.objective if teacher is None else head.cross_entropy, _numbers(metrics))


class LossModule(nn.Module):
    """`losses` as the forward pass of a module: DDP and FSDP reduce only gradients of modules that they wrap.

    With precision bfloat16, matrix products and attention run in 16 bits; weights, stream and routers stay float32.
    """

    def __init__(self, model: Transformer, config: TrainConfig = DEFAULTS, teacher: Transformer | None = None) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.config = config
        if config.recompute == "layers":
            for layer in model.layers:
                layer.forward = partial(_recomputed, layer, layer.forward)
                if isinstance(layer, RoutedBlock):
                    # The selection `exit` calls `narrowed` instead of `forward`.
                    layer.narrowed = partial(_recomputed, layer, layer.narrowed)  # type: ignore[method-assign]

    def forward(self, ids_BS1: Tensor) -> Losses:
        """Returns `losses` of int64 rows (B, S + 1)."""
        enabled = self.config.precision == "bfloat16"
        with torch.autocast(ids_BS1.device.type, dtype=torch.bfloat16, enabled=enabled):
            return losses(self.model, ids_BS1, self.config, self.teacher)


def _recomputed(
    layer: nn.Module, method: Callable[..., Any], tokens: Tokens, decisions: Decisions, *others: Any
) -> Any:
    """Runs a method of a layer and keeps only its input for the backward pass (Chen et al., arXiv 1604.06174)."""
    if not torch.is_grad_enabled():
        return method(tokens, decisions, *others)
    unused_decisions, ran_BT = [decisions], dict(decisions.ran_BT)

    def run(tokens: Tokens) -> Any:
        if unused_decisions:
            return method(tokens, unused_decisions.pop(), *others)
        if isinstance(layer, FSDPModule):
            # FSDP gathers the weights for the gradient of the layer's result. If only the router loss has a gradient
            # here, the result has none.
            layer.unshard()
        # The recomputation in the backward pass decides again; its decisions are discarded.
        again = Decisions()
        again.ran_BT = ran_BT
        return method(tokens, again, *others)

    return checkpoint(run, tokens, use_reentrant=False, preserve_rng_state=False)


def _membership(seen: RouterInputs) -> Tensor:
    """Returns 1.0 for the live tokens that top-k selects of their row, else 0.0: float32 (B, T)."""
    ranked_BT = always_first(seen.l_BT.detach(), seen.index_BT, seen.always_first)
    index_BK, live_BK = select_topk(ranked_BT, seen.live_BT, seen.k)
    return torch.zeros_like(seen.l_BT).scatter(1, index_BK, live_BK.to(seen.l_BT.dtype))


def _mean(value_BT: Tensor, live_BT: Tensor) -> Tensor:
    """Returns the mean over live tokens. All rows have the same number of them, so the mean of two halves of a batch is
    that of the batch.
    """
    return torch.where(live_BT, value_BT, 0).sum() / live_BT.sum().clamp(min=1)


def _cross_entropy(logit_BT: Tensor, selected_BT: Tensor, live_BT: Tensor) -> Tensor:
    return _mean(functional.binary_cross_entropy_with_logits(logit_BT, selected_BT, reduction="none"), live_BT)


def _agreement(logit_BT: Tensor, selected_BT: Tensor, live_BT: Tensor) -> Tensor:
    return _mean(((logit_BT > 0) == (selected_BT > 0)).float(), live_BT)


def _balance(seen: ExpertRouterInputs) -> Tensor:
    """M * sum over experts of (share of tokens with it as first choice) * (its mean probability); 1 if balanced.

    This is equation 4 of Fedus et al., arXiv 2101.03961, for each row, and then the mean over rows, so the distribution
    of rows over processes does not matter. A row whose experts get no token adds 0.
    """
    experts = seen.probability_BTM.shape[-1]
    first_BTM = functional.one_hot(seen.first_BT, experts) * seen.live_BT[..., None]
    live_B1 = seen.live_BT.sum(1, keepdim=True).clamp(min=1)
    share_BM = first_BTM.sum(1) / live_B1
    mean_BM = (seen.probability_BTM * seen.live_BT[..., None]).sum(1) / live_B1
    return experts * (share_BM * mean_BM).sum(-1).mean()


def _slots(model: Transformer, made: Mapping[Site, Routing]) -> dict[str, Tensor]:
    """For each routing site with token choice, the share of the tokens that ran, and the share of the tokens that
    wanted to run but found no slot.

    For a predictor, top-k decides in training, without overflow. That metric is then 0, so that training and evaluation
    have the same metrics.
    """
    routing_spec = model.spec.routing
    learning = routing_spec is not None and routing_spec.selection == "predictor"
    shares = {}
    for site, routing in made.items():
        if routing.rule != FIRST_COME and (not learning or is_expert(site)):
            continue
        ran = routing.live_BK.sum()
        wanted = routing.chosen_BT.sum() if routing.rule == FIRST_COME else ran
        shares[f"tokens_run/{site}"] = ran / routing.open_BT.sum().clamp(min=1)
        shares[f"overflow/{site}"] = (wanted - ran) / wanted.clamp(min=1)
    return shares


def _numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    if not metrics:
        return {}
    # One copy from the device for all values, because every copy waits for the device.
    values = torch.stack([value.detach().float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))
