"""Masks and reductions without an ONNX operator are exported as other operators, with the results of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured

B, S, D = 2, 8, 16
DYNAMIC = {"Loop", "Scan", "NonZero", "SequenceMap", "SequenceEmpty", "SplitToSequence", "ConcatFromSequence"}
"""Operators whose results have sizes that depend on the data, or that no engine but ONNX Runtime takes."""


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(*shape: int) -> Tensor:
    return rand(*shape, seed=1) > 0


MASK = mask_of(B, S)
OF_ONE_ROW = torch.arange(S) % 3 == 1
INDEX = torch.randint(0, S, (B, 5, D), generator=torch.Generator().manual_seed(2))
IDS = torch.randint(0, S, (B, S), generator=torch.Generator().manual_seed(3))


SMALL = torch.tensor([0.0, 1e-12, -1e-12, 2e-8, -3e-8, 1e-5, 1e-3, 0.3, -0.5])
WIDE = torch.tensor([0.0, 1e-12, 2e-8, -0.5, 1.0, 5.0, 20.0, 80.0, -20.0, -80.0, -100.0, 100.0, -3.0])


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    copy = x.clone()
    copy[index] = value
    return copy


Case = tuple[Callable[..., Any], list[Tensor]]
MASKS: dict[str, Case] = {
    "a number": (lambda x, m: put(x, m, 0.5), [rand(B, S, D), MASK]),
    "a number, of some elements": (lambda x: put(x, x > 0, 0.0), [rand(B, S, D)]),
    "one row for all": (lambda x, m, v: put(x, m, v), [rand(B, S, D), MASK, rand(D, seed=4)]),
    "a row for each": (lambda x, m, v: put(x, m, v), [rand(B, S, D), MASK, rand(int(MASK.sum()), D, seed=4)]),
    "of a dimension inside": (lambda x, m: put(x, (slice(None), m), 0.0), [rand(B, S, D), OF_ONE_ROW]),
    "of a dimension inside, a row for each": (
        lambda x, m, v: put(x, (slice(None), m), v), [rand(B, S, D), OF_ONE_ROW, rand(B, 3, D, seed=4)]
    ),
    "masked_scatter of whole rows": (
        lambda x, m, v: x.masked_scatter(m[..., None].expand_as(x), v), [rand(B, S, D), MASK, rand(20, D, seed=4)]
    ),
    "masked_scatter of a narrow mask": (
        lambda x, m, v: x.masked_scatter(m[..., None], v), [rand(B, S, D), MASK, rand(20, D, seed=4)]
    ),
    "masked_scatter of elements": (lambda x, v: x.masked_scatter(x > 0, v), [rand(B, S, D), rand(300, seed=4)]),
    "the first that are true": (lambda x: (x > 0).nonzero_static(size=40, fill_value=-1), [rand(B, S, D)]),
    "more than are true": (lambda m: m.nonzero_static(size=20, fill_value=7), [MASK]),
}  # fmt: skip
SCATTERED: dict[str, Case] = {
    f"{kind} {reduce}{'' if include_self else ' without what was there'}": (
        lambda x, i, v, kind=kind, reduce=reduce, include_self=include_self: getattr(x, kind)(
            1, i, v, reduce, include_self=include_self
        ),
        [rand(B, S, D), INDEX if kind == "scatter_reduce" else torch.tensor([0, 3, 3, 7, 1]), rand(B, 5, D, seed=4)],
    )
    for kind, reductions in (
        ("scatter_reduce", ("sum", "prod", "mean", "amax", "amin")),
        ("index_reduce", ("prod", "mean", "amax", "amin")),
    )
    for reduce in reductions
    for include_self in (True, False)
}
REDUCED: dict[str, Case] = {
    "integers, mean": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "mean"),
        [torch.tensor([9, 4, 7]), torch.tensor([0, 0, 2]), torch.tensor([3, 1, 6])],
    ),
    "median": (lambda x: x.median(1), [rand(B, S, D)]),
    "median of an odd number, kept": (lambda x: x.median(1, keepdim=True), [rand(B, 7, D)]),
    "median of rows of which some hold NaN": (
        lambda x: torch.where(x > 1.5, math.nan, x).median(1).values, [rand(B, S, D)]
    ),
    "median of all": (lambda x: x.median(), [rand(B, S, D)]),
    "cumprod": (lambda x: x.cumprod(1), [rand(B, S, D)]),
    "cumprod of integers": (lambda x: (x > 0).cumprod(1), [rand(B, S, D)]),
    "distances": (lambda x, y: torch.cdist(x, y), [rand(B, S, D), rand(B, 3, D, seed=1)]),
    "distances by the largest": (lambda x: torch.cdist(x, x[:, :3], p=float("inf")), [rand(B, S, D)]),
    "distances, counted": (lambda x: torch.cdist(x.round(), x[:, :3].round(), p=0.0), [rand(B, S, D)]),
    "distances by absolute values": (lambda x: torch.cdist(x, x[:, :3], p=1.0), [rand(B, S, D)]),
    "distances of the third power": (lambda x: torch.cdist(x, x[:, :3], p=3.0), [rand(B, S, D)]),
    "searchsorted": (lambda b, x: torch.searchsorted(b, x), [rand(6).sort().values, rand(B, S)]),
    "searchsorted from the right": (
        lambda b, x: torch.searchsorted(b, x, right=True), [rand(6).sort().values, rand(6).sort().values]
    ),
    "searchsorted in rows": (lambda b, x: torch.searchsorted(b, x), [rand(B, 6).sort().values, rand(B, S)]),
    "bucketize": (lambda b, x: torch.bucketize(x, b, out_int32=True), [rand(6).sort().values, rand(B, S)]),
    "searchsorted of numbers": (
        lambda b, i: (
            torch.searchsorted(b, 0.5), torch.searchsorted(i, 2.5), torch.searchsorted(i, 2, right=True),
            torch.bucketize(1.5, i),
        ),
        [rand(6).sort().values, torch.arange(5)],
    ),
    "bucketize of a tensor without dimensions": (
        lambda b, x: (torch.bucketize(x.mean(), b), torch.searchsorted(b, x.mean(), right=True)),
        [rand(6).sort().values, rand(B, S)],
    ),
    "bucketize of what is no number": (
        lambda b, x: (torch.bucketize(x, b), torch.bucketize(x, b, right=True)),
        [torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.5, math.nan, 0.0, math.inf, -math.inf])],
    ),
    "sorts of a mask": (
        lambda x: (
            (x > 0).argsort(dim=1, descending=True, stable=True), *(x > 0).sort(dim=1, stable=True), (x > 0).msort()
        ),
        [rand(B, S, D)],
    ),
    "integers between a float and an integer": (
        lambda i: (i.clamp(0, 2.5), i.clamp(0.5, 3), i.clamp(1, 3), i.clamp(0.5, 2.5)), [IDS]
    ),
    "a stack of floats and integers": (lambda x, i: torch.stack([x, i], 1), [rand(B, S), IDS]),
    "hstack": (lambda x: torch.hstack([x, x]), [rand(B, S, D)]),
    "vstack": (lambda x: torch.vstack([x, x]), [rand(B, S, D)]),
    "dstack": (lambda x: torch.dstack([x, x]), [rand(B, S, D)]),
    "column_stack": (lambda x: torch.column_stack([x, x]), [rand(S)]),
    "scattered and added": (
        lambda x, i, v: x.scatter(1, i, v, reduce="add"), [rand(B, S, D), INDEX, rand(B, 5, D, seed=4)]
    ),
    "scattered and multiplied": (
        lambda x, i, v: x.scatter(1, i, v, reduce="multiply").scatter(1, i, 0.5, reduce="multiply"),
        [rand(B, S, D), INDEX, rand(B, S, D, seed=4)],
    ),
    "more that is scattered than indices": (
        lambda x, i, v: x.scatter_add(1, i, v) + x.scatter(1, i[:, :1], v) + x.scatter_reduce(1, i, v, "amax"),
        [rand(B, S, D), INDEX, rand(B, S, D, seed=4)],
    ),
    "products added to nothing": (
        lambda x, y: (
            torch.baddbmm(torch.full((1,), torch.nan), x, y, beta=0, alpha=0.5),
            torch.addmm(x[0, :1, :S] * torch.inf, x[0], y[0], beta=0),
            torch.addmv(x[0, :, 0] * torch.nan, x[0], y[0, :, 0], beta=0),
            torch.addr(torch.full((1,), torch.nan), x[0, 0], y[0, 0], beta=0, alpha=2),
            torch.addbmm(torch.full((1,), torch.nan), x, y, beta=0),
            torch.baddbmm(x[:, :, :S], x, y, beta=0.5),
        ),
        [rand(B, S, D), rand(B, D, S, seed=1)],
    ),
    "a convolution in three dimensions": (
        lambda x, w: F.conv3d(x, w, stride=2) + F.conv3d(x, w, bias=None, padding=1)[..., ::2, ::3, ::3].mean(),
        [rand(B, 3, 4, 6, 6), rand(5, 3, 2, 2, 2, seed=1)],
    ),
    "losses": (
        lambda x, i: (
            F.cross_entropy(x, i, label_smoothing=0.1, reduction="none"), F.cross_entropy(x, x.softmax(-1)),
            F.cross_entropy(x, i, weight=torch.linspace(0.5, 2, D), ignore_index=3),
        ),
        [rand(S, D), IDS[0]],
    ),
    "log1p and expm1": (lambda x: (x.clamp(-0.9, 80).log1p() * 1e8, x.clamp(-9, 9).expm1() * 1e8), [SMALL]),
    "log1p and expm1 of wide numbers": (lambda x: (x.abs().log1p(), x.expm1()), [WIDE]),
    "logsigmoid": (lambda x: F.logsigmoid(x), [WIDE]),
    "logaddexp": (
        lambda x: (torch.logaddexp(x, x.roll(3)), torch.logaddexp2(x, x.roll(2)), torch.logaddexp(x, x)), [WIDE]
    ),
    "logcumsumexp": (lambda x: (x.logcumsumexp(0), x[:12].view(3, 4).logcumsumexp(1)), [WIDE]),
    "losses of logits": (
        lambda x, y: (
            F.binary_cross_entropy_with_logits(x, y), F.binary_cross_entropy_with_logits(x, y, reduction="sum"),
            F.binary_cross_entropy_with_logits(x, y, y + 1, pos_weight=y * 3, reduction="none"),
        ),
        [WIDE, WIDE.sigmoid()],
    ),
    "hypot": (lambda x: torch.hypot(x * 1e30, x.roll(1)), [WIDE]),
    "hypot of infinities": (
        lambda x: torch.hypot(x, x.roll(1)), [torch.tensor([math.inf, math.nan, 1.0, -math.inf, math.nan])]
    ),
    "fmax and fmin": (
        lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), [WIDE, torch.where(WIDE > 0, torch.nan, WIDE.roll(1))]
    ),
    "largest and smallest of all": (lambda x: (x.amax(), torch.amin(x, (), keepdim=True)), [rand(B, S, D)]),
    "put": (lambda x, v: x.put(torch.tensor([[3, -1]]), v), [rand(B, S, D), rand(1, 2)]),
    "put and added": (
        lambda x, v: x.put(torch.tensor([3, 3]), v, accumulate=True), [rand(B, S, D), rand(2)]
    ),
    "a diagonal": (lambda x, v: x.diagonal_scatter(v, 1, 1, 2), [rand(B, S, D), rand(B, S)]),
    "a diagonal below": (lambda x, v: x.diagonal_scatter(v, -2, 2, 0), [rand(4, S, 5), rand(S, 3)]),
    "a copy of a number": (lambda x, v: torch.ops.aten.copy.default(x, v), [rand(B, S), torch.tensor(2)]),
    "aminmax": (lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=1, keepdim=True)), [rand(B, S, D)]),
    "rrelu": (lambda x: F.rrelu(x, 0.1, 0.3), [rand(B, S, D)]),
    "a squeeze of what is no 1": (lambda x: x.squeeze(1).squeeze((0, 1)), [rand(1, S, D)]),
}  # fmt: skip
BAGS: dict[str, nn.Module] = {
    "mean": nn.EmbeddingBag(S, D),
    "sum without padding": nn.EmbeddingBag(S, D, mode="sum", padding_idx=2),
    "mean without padding": nn.EmbeddingBag(S, D, padding_idx=2),
    "largest": nn.EmbeddingBag(S, D, mode="max"),
}
ATTENTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "one head of keys": ((B, 1, S, D), (B, 1, S, D), False),
    "one head of values": ((B, 4, S, D), (B, 1, S, D), False),
    "one row of keys": ((1, 4, S, D), (1, 4, S, D), False),
    "one of both": ((1, 1, S, D), (1, 1, S, D), False),
    "one row and one head of both": ((1, 1, S, D), (1, 1, S, D), False),
    "groups": ((B, 2, S, D), (B, 2, S, D), True),
}


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def check(module: nn.Module, inputs: list[Tensor]) -> None:
    """Checks that ONNX Runtime computes the same as PyTorch, and that no size in the graph depends on the data."""
    with torch.no_grad():
        result = module(*inputs)
    expected = [result] if isinstance(result, Tensor) else list(result)
    names, outputs = [f"in_{n}" for n in range(len(inputs))], [f"out_{n}" for n in range(len(expected))]
    with torch.no_grad():
        model = onnx_from_captured(captured(module, inputs, "test"), {}, names, outputs)
    assert {node.op_type for node in model.graph.all_nodes()} & DYNAMIC == set()
    session = pytest.importorskip("onnxruntime").InferenceSession(ir.to_proto(model).SerializeToString())
    read = {value.name for value in session.get_inputs()}
    feeds = {name: value.numpy() for name, value in zip(names, inputs, strict=True) if name in read}
    for value, reference in zip(session.run(None, feeds), expected, strict=True):
        assert (value.shape, value.dtype) == (tuple(reference.shape), reference.numpy().dtype)
        np.testing.assert_allclose(value, reference.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.fast(
    "a number", "a row for each", "of a dimension inside, a row for each", "masked_scatter of whole rows",
    "masked_scatter of elements", "the first that are true",
)  # fmt: skip
@pytest.mark.parametrize("case", MASKS)
def test_what_a_mask_selects_is_chosen_in_place(case: str) -> None:
    function, inputs = MASKS[case]
    check(Calling(function), inputs)


@pytest.mark.fast(
    "scatter_reduce mean", "scatter_reduce prod without what was there", "index_reduce mean without what was there",
    "index_reduce amax",
)  # fmt: skip
@pytest.mark.parametrize("case", SCATTERED)
@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta:UserWarning")
def test_every_reduction_of_what_is_scattered(case: str) -> None:
    function, inputs = SCATTERED[case]
    check(Calling(function), inputs)


@pytest.mark.fast(
    "median", "searchsorted", "cumprod", "logsigmoid", "distances", "put", "scattered and multiplied",
    "a convolution in three dimensions", "losses of logits", "logcumsumexp",
    "sorts of a mask", "searchsorted of numbers",
)  # fmt: skip
@pytest.mark.parametrize("case", REDUCED)
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter with Tensor src is deprecated:UserWarning")
def test_what_onnx_has_no_operator_for(case: str) -> None:
    function, inputs = REDUCED[case]
    check(Calling(function), inputs)


def test_positions_of_true_entries_depend_on_no_rounding_and_no_order_of_ties() -> None:
    """OpenVINO does not keep equal entries in their order, and 16-bit graphs round floats."""
    from runtimes import in_openvino

    mask = torch.arange(60).reshape(1, 3, 20) % 3 > 0
    example = captured(Calling(lambda m: m.nonzero_static(size=50)), [mask], "test")
    model = onnx_from_captured(example, {}, ["mask"], ["positions"])
    kinds = {value.dtype for node in model.graph for value in node.outputs}
    assert not kinds & {ir.DataType.FLOAT, ir.DataType.DOUBLE}
    (positions,) = in_openvino(model)({"mask": mask.numpy()})
    np.testing.assert_array_equal(positions, mask.nonzero_static(size=50))


@pytest.mark.fast("mean without padding", "largest")
@pytest.mark.parametrize("case", BAGS)
def test_bags_of_one_size_are_rows(case: str) -> None:
    check(Calling(BAGS[case].requires_grad_(False)), [IDS])


@pytest.mark.filterwarnings(
    "ignore:LSTM with projections:UserWarning", "ignore:The tensor attributes self.lstm._flat_weights:UserWarning"
)
def test_an_lstm_with_projections_is_its_steps() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(D, 12, proj_size=4, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            y, (h, c) = self.lstm(x)
            return y, h, c

    check(Projected().requires_grad_(False), [rand(B, 3, D)])


@pytest.mark.fast("one head of values", "one row of keys", "groups")
@pytest.mark.parametrize("case", ATTENTIONS)
def test_heads_and_rows_of_keys_are_shared_as_in_pytorch(case: str) -> None:
    key, value, grouped = ATTENTIONS[case]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    heads = 1 if "one head of both" in case else 4
    check(Calling(attention), [rand(B, heads, S, D), rand(*key, seed=1), rand(*value, seed=2)])
