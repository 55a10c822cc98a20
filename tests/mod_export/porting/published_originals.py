"""Published routed layers in plain Python, most of them not static, with the weights of their static forms."""

from __future__ import annotations

import published
import torch
from layers import TEXTS
from torch import Tensor, nn


class Astramind(published.Astramind):
    def forward(self, x: Tensor) -> Tensor:
        out, score = x.clone(), self.score(x)
        for row in range(x.shape[0]):
            mask = score[row] > score[row].topk(self.k(x)).values[-1]
            position = torch.arange(x.shape[1])[mask]
            out[row, mask] = self.block(x[row, mask][None], position)[0] * score[row, mask, None]
        return out


class MixtureAi(published.MixtureAi):
    def forward(self, x: Tensor) -> Tensor:
        out, mask = x.clone(), self.aux(x).squeeze(-1).sigmoid() > 0.5
        for row in range(x.shape[0]):
            chosen = x[row][mask[row]]
            out[row, mask[row]] = self.router(chosen) * self.block(chosen[None])[0]
        return out


class PMod(published.PMod):
    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        out = x.clone()
        for row in range(x.shape[0]):
            image = (~is_text[row]).nonzero().squeeze(1)
            score = self.router(x[row, image]).squeeze(-1)
            weight = 0.2 * score.tanh() + 1
            out[row, image] = x[row, image] * weight[:, None]
            best = score.topk(int(0.5 * len(image))).indices
            index = torch.cat([is_text[row].nonzero().squeeze(1), image[best]])
            scale = torch.cat([torch.ones(TEXTS), weight[best]])
            index, order = index.sort()
            chosen = x[row, index][None]
            h = chosen + self.block.attend(chosen, index)
            out[row, index] = (h + scale[order][:, None] * self.block.feed(h))[0]
        return out


class Dlo(published.Dlo):
    def forward(self, x: Tensor) -> Tensor:
        out, gate = x.clone(), self.router(x).sigmoid()
        for row in range(x.shape[0]):
            index = torch.where(gate[row, :, 0] > 0.5)[0]
            chosen = x[row, index][None]
            h = chosen + self.block.attend(chosen, index)
            out[row, index] = (h + (0.75 + (gate[row, index] - 0.5) * 0.5) * self.block.feed(h))[0]
        return out


class Praxis(published.Praxis):
    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        index = score.topk(self.k(x)).indices.sort(-1).values
        rows = torch.arange(x.shape[0])[:, None]
        chosen, weight = x[rows, index], score[rows, index][..., None]
        h = chosen + self.block.attend(chosen)
        update = self.block.feed(h)
        out = x.clone()
        out[rows, index] = h + (update if (weight == 0).all() else weight * update)
        return out


class Supermix(published.Supermix):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).sigmoid() * (self.predictor(x) > 0)
        h = x + gate * self.block.attend(x)
        return h + gate * self.block.feed(h)


class SkipGpt(published.SkipGpt):
    def forward(self, x: Tensor) -> Tensor:
        h = x + self.runs(self.router_attention, x)[..., None] * self.block.attend(x)
        return h + self.runs(self.router_mlp, x)[..., None] * self.block.feed(h)


class DLlm(published.DLlm):
    def forward(self, x: Tensor) -> Tensor:
        """Computes all tokens; a mask hides skipped tokens from the others."""
        wants, position = self.wants(x), torch.arange(x.shape[1])
        causal = position[None, :] <= position[:, None]
        seen = causal & wants[:, None, :] | torch.eye(x.shape[1], dtype=torch.bool)
        h = x + self.block.attend(x, position, seen[:, None])
        return torch.where(wants[..., None], h + self.block.feed(h), x)


class Codedestructor(published.Codedestructor):
    def forward(self, x: Tensor) -> Tensor:
        index = self.score(x).topk(6).indices.sort().values
        taken = [set(row) for row in index.tolist()]
        rest = torch.tensor([[t for t in range(x.shape[1]) if t not in row] for row in taken])
        rows = torch.arange(x.shape[0])[:, None]
        return torch.cat([self.block(x[rows, index]), x[rows, rest]], 1)


ORIGINALS: dict[str, type[nn.Module]] = {
    "astramind": Astramind, "mixture_ai": MixtureAi, "p_mod": PMod, "dlo": Dlo, "praxis": Praxis, "supermix": Supermix,
    "skipgpt": SkipGpt, "d_llm": DLlm, "codedestructor": Codedestructor,
}  # fmt: skip


def original_of(name: str, model: nn.Module) -> nn.Module:
    """Changes the routed layers of the model, in place, to the published originals; the weights stay."""
    for block in model.blocks:  # type: ignore[union-attr]
        if type(block) is ORIGINALS[name].__bases__[0]:
            block.__class__ = ORIGINALS[name]
    return model
