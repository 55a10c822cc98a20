"""Mixture-of-Depths blocks in the styles of public code, none of which marks its selection.

docs/models.md describes these styles. Each block has D = 16, k = S / 4, and causal attention inside.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from mod_export.graph.capture import Captured, captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.rewrites import PORTABLE, apply_rewrites
from mod_export.graph.sites import routing_sites, with_routed_outputs
from mod_export.graph.weights import state_of

V, D, HEADS = 40, 16, 2


class Inner(nn.Module):
    """A transformer block with LayerNorm, biases and fused qkv."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D),
        )  # fmt: skip

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        q, k, v = (part.view(B, S, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x_BSD)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(B, S, D)
        x_BSD = x_BSD + self.out(attended)
        return x_BSD + self.down(F.gelu(self.up(self.norm_2(x_BSD))))


class Routed(nn.Module):
    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(D, 1, bias=False), Inner(causal=causal)


class ScatterAdd(Routed):
    """Unsorted top-k over (B, S, 1), then sorted by position; the raw score is the gate; `scatter_add` into x."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x)
        gate, index = torch.topk(score, x.shape[1] // 4, dim=1, sorted=False)
        index, order = torch.sort(index, dim=1)
        gate = torch.gather(gate, 1, order)
        index = index.expand(-1, -1, D)
        return torch.scatter_add(x, 1, index, self.block(torch.gather(x, 1, index)) * gate)


class IndexPut(Routed):
    """Indices in order of score; `x[rows, index]` reads and writes; softmax over the whole row, without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        _, index = self.router(x).squeeze(-1).softmax(-1).topk(x.shape[1] // 4, dim=-1)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        out = x.clone()
        out[rows, index] = self.block(x[rows, index])
        return out


class ArgSort(Routed):
    """The head of a stable argsort, sorted by position; a sigmoid gate; `scatter`."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x)[..., 0]
        index = torch.argsort(score, dim=1, descending=True, stable=True)[:, : x.shape[1] // 4].sort(dim=1).values
        wide = index.unsqueeze(-1).expand(-1, -1, D)
        chosen = x.gather(1, wide)
        gate = torch.sigmoid(score.gather(1, index)).unsqueeze(-1)
        return x.scatter(1, wide, chosen + gate * (self.block(chosen) - chosen))


class SortTail(Routed):
    """The tail of an ascending sort gives the largest scores and their indices."""

    def forward(self, x: Tensor) -> Tensor:
        values, order = self.router(x)[..., 0].sort(dim=1)
        index, gate = order[:, -(x.shape[1] // 4) :], values[:, -(x.shape[1] // 4) :]
        wide = index.unsqueeze(-1).expand(-1, -1, D)
        return x.scatter_add(1, wide, torch.tanh(gate)[..., None] * self.block(x.gather(1, wide)))


class OneHot(Routed):
    """Products with one-hot rows in place of gather and scatter."""

    def forward(self, x: Tensor) -> Tensor:
        gate, index = torch.topk(self.router(x)[..., 0], x.shape[1] // 4)
        chosen = F.one_hot(index, x.shape[1]).to(x.dtype)
        return x + chosen.transpose(1, 2) @ (self.block(chosen @ x) * torch.tanh(gate)[..., None])


class IndexAdd(Routed):
    """Indices into the flattened batch; softmax over the selected tokens."""

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        gate, index = torch.topk(self.router(x)[..., 0], S // 4)
        index, order = index.sort()
        gate = gate.gather(1, order).softmax(-1)[..., None]
        flat = (index + torch.arange(B, device=x.device)[:, None] * S).reshape(-1)
        rows = x.reshape(B * S, D)
        update = self.block(rows[flat].view(B, S // 4, D)) * gate
        return rows.index_add(0, flat, update.reshape(-1, D)).view(B, S, D)


class Smallest(Routed):
    """The tokens with the smallest scores run."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.topk(self.router(x)[..., 0], x.shape[1] // 4, largest=False).indices.sort().values
        wide = index.unsqueeze(-1).expand(-1, -1, D)
        return x.scatter(1, wide, self.block(x.gather(1, wide)))


DIALECTS = {
    "scatter_add": ScatterAdd, "index_put": IndexPut, "argsort": ArgSort, "sort_tail": SortTail, "one_hot": OneHot,
    "index_add": IndexAdd, "smallest": Smallest,
}  # fmt: skip


class Model(nn.Module):
    """Maps token ids to logits through pairs of blocks, of which every second one is routed."""

    def __init__(self, routed: type[nn.Module], pairs: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(V, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList([block() for block in (Inner, routed) * pairs])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def capture_of(program: ExportedProgram) -> Captured:
    """What engines are built from, as `captured` makes it of this exported program."""
    return Captured(with_routed_outputs(program), tuple(routing_sites(program)))


def graph_of(capture: Captured, module: nn.Module) -> ir.Model:
    """The portable graph of a captured model with one input and one output, with its weights in it."""
    state = state_of(module)
    model = onnx_from_captured(capture, state, ["x"], ["y"])
    for weight, value in model.graph.initializers.items():
        if weight in state:
            value.const_value = ir.tensor(state[weight].detach().numpy(), name=weight)
    apply_rewrites(model, PORTABLE, "float32")
    return model


def dialect_graph(name: str, batch: int, seq: int) -> ir.Model:
    """The portable graph of a model with one block of this dialect."""
    torch.manual_seed(0)
    module = Model(DIALECTS[name], pairs=1).eval()
    return graph_of(captured(module, (torch.zeros(batch, seq, dtype=torch.int64),), name), module)
