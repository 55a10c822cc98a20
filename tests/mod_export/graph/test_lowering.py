"""Operators that are lowered to other operators compute the same, and are exported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export.graph.capture import Captured, captured
from mod_export.graph.lowering import lower
from mod_export.graph.onnx_export import onnx_from_captured

EINSUMS: dict[str, list[tuple[int, ...]]] = {
    "btd,hde->bhte": [(2, 5, 6), (3, 6, 4)],
    "bhqe,bhke->bhqk": [(2, 3, 5, 4), (2, 3, 7, 4)],
    "bhqk,bhke,hed->bqd": [(2, 3, 5, 7), (2, 3, 7, 4), (3, 4, 6)],
    "bkt,bkd,bk->btd": [(2, 3, 5), (2, 3, 4), (2, 3)],
    "b s d, d -> b s": [(2, 3, 4), (4,)],
    "bt,btd->btd": [(2, 3), (2, 3, 4)],
    "i,j->ij": [(2,), (3,)],
    "i,i->": [(3,), (3,)],
    "bi,bj->b": [(2, 3), (2, 4)],
    "ij,jk": [(2, 3), (3, 4)],
    "ba": [(2, 3)],
    "ij->": [(2, 3)],
    "ii->i": [(4, 4)],
    "...d,de->...e": [(2, 3, 4), (4, 5)],
    "ab,cb->ac": [(2, 1), (3, 4)],
}
Shape = tuple[int, ...]
ATTENTIONS: dict[str, tuple[Shape, Shape, Shape | None, dict[str, bool | float]]] = {
    "two": ((5, 4), (5, 4), (5, 5), {}),
    "rows": ((2, 5, 4), (2, 7, 4), None, {}),
    "causal rows": ((2, 5, 4), (2, 5, 4), None, {"is_causal": True, "scale": 0.3}),
    "a mask for each row": ((2, 5, 4), (2, 7, 4), (2, 5, 7), {}),
    "one mask": ((2, 5, 4), (2, 7, 4), (5, 7), {}),
    "padding": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 1, 1, 7), {}),
    "groups": ((2, 3, 4, 5, 6), (2, 3, 4, 5, 6), None, {}),
    "groups under a mask of each group": ((2, 3, 4, 5, 6), (2, 3, 4, 5, 6), (3, 1, 5, 5), {}),
    "groups under a mask of each row": ((2, 3, 4, 5, 6), (2, 3, 4, 5, 6), (2, 1, 1, 5, 5), {}),
}


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *operands: Tensor) -> Tensor:
        return torch.einsum(self.equation, *operands)


class Attention(nn.Module):
    def __init__(self, how: dict[str, bool | float]) -> None:
        super().__init__()
        self.how = how

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **self.how)  # type: ignore[arg-type]


def check(module: nn.Module, inputs: Sequence[Tensor], calls: int) -> None:
    """Checks that the lowered program computes the same, and that its ONNX graph has no Einsum."""
    capture: Captured = captured(module, inputs, "test")
    before = capture.program.graph_module(*inputs)[0]
    lower(capture.program.graph_module)
    capture.program.graph_module.recompile()
    torch.testing.assert_close(capture.program.graph_module(*inputs)[0], before)
    assert sum(node.op == "call_function" for node in capture.program.graph.nodes) >= calls
    names = [f"in_{n}" for n in range(len(inputs))]
    model = onnx_from_captured(capture, {}, names, ["out"])
    assert "Einsum" not in {node.op_type for node in model.graph}
    run = pytest.importorskip("onnxruntime").InferenceSession(ir.to_proto(model).SerializeToString()).run
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    np.testing.assert_allclose(run(None, feeds)[0], before.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.fast(
    "bhqk,bhke,hed->bqd", "bkt,bkd,bk->btd", "b s d, d -> b s", "i,i->", "bi,bj->b", "ba", "ii->i", "...d,de->...e",
    "ab,cb->ac",
)  # fmt: skip
@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum_is_products(equation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    check(Einsum(equation), [torch.randn(shape, generator=generator) for shape in EINSUMS[equation]], 1)


def test_an_einsum_of_attention_is_one_product() -> None:
    """A dimension that MatMul can keep is not folded."""
    operands = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)]
    capture: Captured = captured(Einsum("bhqe,bhke->bhqk"), operands, "test")
    model = onnx_from_captured(capture, {}, ["q", "k"], ["scores"])
    assert [node.op_type for node in model.graph if node.op_type != "Reshape"] == ["Transpose", "MatMul"]


@pytest.mark.fast("two", "causal rows", "a mask for each row", "groups under a mask of each group")
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_has_four_dimensions(case: str) -> None:
    query, key, mask, how = ATTENTIONS[case]
    generator = torch.Generator().manual_seed(0)
    shapes = [query, key, key, *([] if mask is None else [mask])]
    check(Attention(how), [torch.randn(shape, generator=generator) for shape in shapes], 3)


class Kth(nn.Module):
    """Keeps the scores from the k-th smallest on, and adds the index of that one."""

    def __init__(self, k: int, *, keepdim: bool) -> None:
        super().__init__()
        self.k, self.keepdim = k, keepdim

    def forward(self, scores: Tensor) -> Tensor:
        value, index = torch.kthvalue(scores, self.k, dim=1, keepdim=self.keepdim)
        if not self.keepdim:
            value, index = value.unsqueeze(1), index.unsqueeze(1)
        return (scores >= value) * scores + index


@pytest.mark.fast("1-True", "4-False", "7-True")
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_the_kth_value_is_that_of_a_top_k(k: int, keepdim: bool) -> None:
    check(Kth(k, keepdim=keepdim), [torch.randn(2, 7, 3)], 2)


class Copied(nn.Module):
    """Writes into a copy, which must not be the original."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32, copy=True).add_(1) * x


def test_a_copy_stays_one() -> None:
    check(Copied(), [torch.rand(3, 4)], 2)


class Branches(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return torch.einsum("bd,de->be", x, weight)

        return torch.cond(x.sum() > 0, product, lambda x, _: (1 - x).to(torch.float64).to(torch.float32), (x, weight))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_branches_of_conditions_are_lowered_as_well(sign: float) -> None:
    generator = torch.Generator().manual_seed(0)
    check(Branches(), [sign * torch.rand(3, 4, generator=generator), torch.rand(4, 4, generator=generator)], 1)
