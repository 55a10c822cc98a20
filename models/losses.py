"""What a training step minimizes: next-token cross entropy, and beside it what the model's routing has to learn.

Top-k looks at a whole row, so at generation, one token at a time, something else has to decide. The paper (Raposo et
al., arXiv 2404.02258, section 3.5) gives two ways, and both are here: an auxiliary predictor on stop-gradient inputs
that learns which tokens top-k selects, and a binary cross entropy on the router's own outputs, whose gradient reaches
the router and the stream and which centres the scores so that "l > 0" means "selected".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mod_models.next_token import Teacher, next_token_loss
from mod_models.routing import Decisions, Routing, Seen, SeenByExperts
from mod_models.selection import FIRST_COME, Tokens, select_topk
from mod_models.spec import Site, is_expert
from mod_models.train_config import TrainConfig
from mod_models.transformer import Transformer

DEFAULTS = TrainConfig()


class Losses(NamedTuple):
    """The losses of some rows.

    Attributes:
        total: float32 scalar with a gradient: `next_token` and the weighted other losses.
        next_token: float32 scalar, mean cross entropy of the next token in nats; it has a gradient of its own unless
            there is a teacher.
        metrics: name -> number, of what the model has and what is trained: `predictor_loss`, `router_loss` (nats) and
            `balance_loss`, summed over layers, and `distill_loss` (nats), before their weights;
            `predictor_accuracy/<site>` and `router_accuracy/<site>`, share of the positions where the sign of the
            logit says whether top-k selects the token; `overflow/<site>`, share of the tokens that wanted to run and
            found no slot.
    """

    total: Tensor
    next_token: Tensor
    metrics: dict[str, float]


def losses(
    model: Transformer, ids_BS1: Tensor, config: TrainConfig = DEFAULTS, teacher: Transformer | None = None
) -> Losses:
    """One forward pass and its losses. Every loss is a mean over rows and positions, so the mean of the losses of two
    halves of a batch is the loss of the batch.

    Args:
        model: float32, on the device of `ids_BS1`.
        ids_BS1: int64 (B, S + 1) token ids, none of them padding. The model reads the first S and predicts the last S.
        config: has the weights of the other losses; 0 leaves a loss out, with no gradient at all.
        teacher: the model to distil from, with the same vocabulary. Its activations are freed layer by layer.
    """
    ids_BS, target_BS = ids_BS1[:, :-1], ids_BS1[:, 1:]
    lengths_B = torch.full((len(ids_BS),), ids_BS.shape[1], device=ids_BS.device)
    decisions = Decisions()
    taught = None
    if teacher is not None:
        with torch.no_grad():
            taught = Teacher(teacher.hidden(ids_BS, lengths_B, Decisions()).flatten(0, 1), teacher.head_weight)
    hidden_ND = model.hidden(ids_BS, lengths_B, decisions).flatten(0, 1)
    head = next_token_loss(hidden_ND, model.head_weight, target_BS.flatten(), taught, config.distill)
    auxiliary: dict[str, list[Tensor]] = {"predictor": [], "router": [], "balance": []}
    metrics: dict[str, Tensor] = {}
    for site, seen in decisions.seen.items():
        selected_BT = _membership(seen)
        if seen.predictor is not None:
            logit_BT = seen.predictor(seen.x_BTD.detach())
            auxiliary["predictor"].append(_cross_entropy(logit_BT, selected_BT, seen.live_BT))
            metrics[f"predictor_accuracy/{site}"] = _agreement(logit_BT, selected_BT, seen.live_BT)
        if config.router_loss > 0:
            # A metric of what is trained only: without this loss the sign of a score means nothing.
            auxiliary["router"].append(_cross_entropy(seen.l_BT, selected_BT, seen.live_BT))
            metrics[f"router_accuracy/{site}"] = _agreement(seen.l_BT, selected_BT, seen.live_BT)
    auxiliary["balance"] = [_balance(seen) for seen in decisions.experts.values()]
    metrics |= _overflow(model, decisions.made)
    total = head.objective
    if teacher is not None:
        metrics["distill_loss"] = head.divergence
    for name, by_layer in auxiliary.items():
        if by_layer:
            loss = torch.stack(by_layer).sum()
            metrics[f"{name}_loss"] = loss
            # Not `0 * loss`: with a gradient of zeros the optimizer would still decay weights that nothing trains.
            weight = getattr(config, f"{name}_loss")
            total = total + weight * loss if weight > 0 else total
    return Losses(total, head.objective if teacher is None else head.cross_entropy, _numbers(metrics))


class LossModule(nn.Module):
    """`losses` as a module's forward pass, because DDP and FSDP reduce gradients of what runs through theirs.

    In bfloat16, matrix products and attention run in 16 bits; weights, residual stream and routers stay float32.
    """

    def __init__(self, model: Transformer, config: TrainConfig = DEFAULTS, teacher: Transformer | None = None) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.config = config
        if config.recompute == "layers":
            for layer in model.layers:
                layer.forward = partial(_recomputed, layer.forward)

    def forward(self, ids_BS1: Tensor) -> Losses:
        """The losses of int64 rows (B, S + 1); see `losses`."""
        enabled = self.config.precision == "bfloat16"
        with torch.autocast(ids_BS1.device.type, dtype=torch.bfloat16, enabled=enabled):
            return losses(self.model, ids_BS1, self.config, self.teacher)


def _recomputed(forward: Callable[..., Tensor], tokens: Tokens, decisions: Decisions, *others: Any) -> Tensor:
    """A layer of which only the input is kept for the backward pass (Chen et al., arXiv 1604.06174)."""
    if not torch.is_grad_enabled():
        return forward(tokens, decisions, *others)
    first = [decisions]

    def run(tokens: Tokens) -> Tensor:
        # What is computed again is decided again, and nobody reads it then.
        return forward(tokens, first.pop() if first else Decisions(), *others)

    x_BTD: Tensor = checkpoint(run, tokens, use_reentrant=False, preserve_rng_state=False)
    return x_BTD


def _membership(seen: Seen) -> Tensor:
    """1.0 for the tokens with the k largest scores of their row, float32 (B, T)."""
    index_BK, live_BK = select_topk(seen.l_BT.detach(), seen.live_BT, seen.k)
    return torch.zeros_like(seen.l_BT).scatter(1, index_BK, live_BK.to(seen.l_BT.dtype))


def _mean(value_BT: Tensor, live_BT: Tensor) -> Tensor:
    """Over live tokens. Rows of one length have as many of them, so that the mean of halves is that of the whole."""
    return torch.where(live_BT, value_BT, 0).sum() / live_BT.sum().clamp(min=1)


def _cross_entropy(logit_BT: Tensor, selected_BT: Tensor, live_BT: Tensor) -> Tensor:
    return _mean(functional.binary_cross_entropy_with_logits(logit_BT, selected_BT, reduction="none"), live_BT)


def _agreement(logit_BT: Tensor, selected_BT: Tensor, live_BT: Tensor) -> Tensor:
    return _mean(((logit_BT > 0) == (selected_BT > 0)).float(), live_BT)


def _balance(seen: SeenByExperts) -> Tensor:
    """M * sum over experts of (share of the tokens whose first choice it is) * (mean probability of it); 1 when even.

    Equation 4 of Fedus et al., arXiv 2101.03961, of each row, and then the mean over rows, so that it does not depend
    on how rows are spread over processes. A row of which no token is given to the experts adds nothing.
    """
    experts = seen.probability_BTM.shape[-1]
    first_BTM = functional.one_hot(seen.first_BT, experts) * seen.live_BT[..., None]
    live_B1 = seen.live_BT.sum(1, keepdim=True).clamp(min=1)
    share_BM = first_BTM.sum(1) / live_B1
    mean_BM = (seen.probability_BTM * seen.live_BT[..., None]).sum(1) / live_B1
    return experts * (share_BM * mean_BM).sum(-1).mean()


def _overflow(model: Transformer, made: Mapping[Site, Routing]) -> dict[str, Tensor]:
    """The share of the tokens that wanted to run and found no slot, for each routing site with token choice.

    Where a predictor will decide, top-k decides in training, and there is no overflow; the metric is still there, so
    that training and evaluation have the same metrics.
    """
    routing_spec = model.spec.routing
    learning = routing_spec is not None and routing_spec.selection == "predictor"
    found = {}
    for site, routing in made.items():
        if routing.rule == FIRST_COME:
            wanted = routing.chosen_BT.sum()
            found[f"overflow/{site}"] = (wanted - routing.live_BK.sum()) / wanted.clamp(min=1)
        elif learning and not is_expert(site):
            found[f"overflow/{site}"] = torch.zeros((), device=routing.score_BT.device)
    return found


def _numbers(metrics: dict[str, Tensor]) -> dict[str, float]:
    if not metrics:
        return {}
    # One copy from the device for all of them, because every copy waits for it.
    values = torch.stack([value.detach().float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))
