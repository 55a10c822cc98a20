"""An architecture with only what export itself needs: one block of plain PyTorch, which skips tokens by a router.

The tests install it as a package of its own. A checkpoint holds `k` beside the weights; with None every token runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mod_export.model.architecture import Architecture
from mod_export.model.model import Model, TokenIds

VOCABULARY, WIDTH, POSITIONS = 32, 16, 64


class Block(nn.Module):
    def __init__(self, k: int | None) -> None:
        super().__init__()
        self.k, self.up, self.down = k, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if k is not None:
            self.router = nn.Linear(WIDTH, 1)

    def forward(self, x_BSD: Tensor, real_BS: Tensor) -> Tensor:
        if self.k is None:
            return x_BSD + self.down(self.up(x_BSD).relu())
        score_BS = self.router(x_BSD).squeeze(-1).masked_fill(~real_BS, -torch.inf)
        index_BK = torch.sort(torch.topk(score_BS, self.k).indices).values
        live_BK = torch.gather(real_BS, 1, index_BK)
        index_BKD = index_BK[..., None].expand(-1, -1, WIDTH)
        chosen_BKD = torch.gather(x_BSD, 1, index_BKD)
        gate_BK1 = torch.gather(score_BS, 1, index_BK).masked_fill(~live_BK, 0)[..., None].sigmoid()
        update_BKD = gate_BK1 * self.down(self.up(chosen_BKD).relu()) * live_BK[..., None]
        return x_BSD.scatter(1, index_BKD, chosen_BKD + update_BKD)


class Plain(nn.Module):
    def __init__(self, k: int | None) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), Block(k)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor]:
        real_BS = torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]
        return (self.head(self.block(self.embedding(input_ids), real_BS)),)


class PlainModel(Model):
    spec: Mapping[str, Any] = {}
    weights: Mapping[str, Tensor] = {}
    tokens = TokenIds(VOCABULARY, POSITIONS)

    def __init__(self, spec: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.spec, self.weights = spec, weights

    def module(self, outputs: str = "logits") -> nn.Module:
        module = Plain(self.spec["k"])
        module.load_state_dict(dict(self.weights))
        return module.eval()

    def skeleton(self, outputs: str = "logits") -> nn.Module:
        with torch.device("meta"):
            return Plain(self.spec["k"]).eval()


class PlainArchitecture(Architecture):
    name = "plain_mod"

    def read(self, path: Path) -> PlainModel:
        data = torch.load(path, weights_only=True)
        if data["architecture"] != self.name:
            raise LookupError(data["architecture"])
        return self.restore(data["spec"], data["weights"])

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, Tensor]) -> PlainModel:
        return PlainModel(spec, weights)

    def random(self, spec: Mapping[str, Any], seed: int, path: Path) -> None:
        torch.manual_seed(seed)
        data = {"architecture": self.name, "spec": dict(spec), "weights": Plain(spec["k"]).state_dict()}
        torch.save(data, path)


ARCHITECTURE = PlainArchitecture()
