"""Mixture-of-Recursions with expert choice, written again from facts like the models in `implementation_models.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from implementation_models import OfTransformers, enlivened
from torch import Tensor, nn


class Step(nn.Module):
    """Layers under one router, Linear(D, 1) or two layers with GELU, and a second router that only training uses."""

    def __init__(self, block: nn.ModuleList, width: int, hidden: int, auxiliary: bool) -> None:
        super().__init__()
        self.block = block
        router: nn.Module = nn.Linear(width, 1, bias=False)
        if hidden:
            layers = nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, 1, bias=False)
            router = nn.Sequential(*layers)
        self.mor_router = nn.ModuleDict({"router": router})
        if auxiliary:
            self.mlp_router = nn.ModuleDict({"router": nn.Linear(width, 1, bias=False)})


class Recursions(OfTransformers):
    """A first and a last layer, and three steps of two shared layers. Each step runs the tokens with the largest scores
    of those that the step before ran, and adds 0.1 * sigmoid(l) times its result to them.
    """

    def __init__(self, seed: int, hidden: int = 0, *, middle: bool = True, auxiliary: bool = False) -> None:
        ends = 1 if middle else 0
        super().__init__("Llama", seed, num_hidden_layers=6 + 2 * ends, tie_word_embeddings=middle)
        layers, width = list(self.whole.model.layers), self.whole.config.hidden_size
        shared = nn.ModuleList(layers[ends : ends + 2])
        steps = [Step(shared, width, hidden, auxiliary) for _ in range(3)]
        for number, step in enumerate(steps):
            enlivened(step.mor_router, seed + number)
        self.capacities = [1.0, 2 / 3, 1 / 3]
        self.decided_by_zero = False
        self.whole.model.layers = nn.ModuleList([*layers[:ends], *steps, *layers[len(layers) - ends :]])

    def row(self, ids_T: Tensor) -> Tensor:
        x_TD, position_T = self.whole.model.embed_tokens(ids_T), torch.arange(len(ids_T))
        ran_T, capacities = position_T, iter(self.capacities)
        for layer in self.whole.model.layers:
            if not isinstance(layer, Step):
                x_TD = self.block(layer, x_TD, position_T)
                continue
            score_T = layer.mor_router["router"](x_TD[ran_T])[:, 0]
            if self.decided_by_zero:
                chosen_K = (score_T > 0).nonzero()[:, 0]
            else:
                k = max(1, int(next(capacities) * len(ids_T)))
                chosen_K = score_T.topk(k).indices.sort().values
            ran_T = ran_T[chosen_K]
            y_KD = x_TD[ran_T]
            for each in layer.block:
                y_KD = self.block(each, y_KD, position_T[ran_T])
            x_TD = x_TD.clone()
            x_TD[ran_T] += 0.1 * score_T[chosen_K].sigmoid()[:, None] * y_KD
        return self.head(x_TD)

    def save(self, folder: Path, **changes: Any) -> None:
        super().save(folder, **{"architectures": ["MoRLlamaForCausalLM"], **changes})
