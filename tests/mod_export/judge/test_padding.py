"""Rows of padding that an input declares are not judged where they do not matter; all other rows are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from small_graphs import session
from torch import Tensor, nn

from mod_export.config import config_from_toml
from mod_export.engines.ort_session import OrtRunner
from mod_export.graph.capture import captured
from mod_export.graph.onnx_export import onnx_from_captured
from mod_export.graph.weights import state_of
from mod_export.judge.causality import declared_padding
from mod_export.judge.inputs import Batch, batches_of
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.model.module import model_from_module
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Setting

D, V, B, S = 16, 40, 2, 12
BUCKET = Bucket(B, S)
CONFIG = config_from_toml(None)
SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=BUCKET)
LOWEST = torch.finfo(torch.float32).min
LEFT = [[0] * 3 + [1] * 9, [0] * 4 + [1] * 8]
RIGHT = [row[::-1] for row in LEFT]


class Encoder(nn.Module):
    """One attention that returns logits (B, S, V) and their mean over real tokens (B, V).

    By `form`, `mask` is 1 for real tokens ("counts"), True for padding ("hidden"), or additive (B, 1, S, S).
    """

    def __init__(self, form: str = "counts", *, causal: bool = False) -> None:
        super().__init__()
        self.embedding, self.qkv, self.out = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.head, self.form, self.causal = nn.Linear(D, V), form, causal

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.form == "counts":
            counts = mask
            bias = (1.0 - mask[:, None, None].float()) * LOWEST
        elif self.form == "hidden":
            counts = ~mask
            bias = torch.zeros(mask.shape)[:, None, None].masked_fill(mask[:, None, None], LOWEST)
        else:
            counts, bias = mask[:, 0, -1] == 0, mask
        if self.causal:
            bias = bias + torch.full((S, S), LOWEST).triu(1)
        x = self.embedding(ids)
        q, k, v = self.qkv(x).view(B, S, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-1, -2) / 3 + bias).softmax(-1) @ v
        logits = self.head(x + self.out(y.transpose(1, 2).reshape(B, S, D)))
        return self.returned(logits, counts.float())

    def returned(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return logits, (logits * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)


class OtherPadding(Encoder):
    """Returns NaN at padding, as an engine in float16 may, and the same everywhere else."""

    def returned(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        logits, pooled = super().returned(logits, counts)
        return torch.where(counts[..., None] > 0, logits, logits / 0.0 * 0.0), pooled


class WrongRealRow(Encoder):
    """Returns one wrong real row."""

    def returned(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        logits, pooled = super().returned(logits, counts)
        return logits + 1e-3 * (torch.arange(S) == 5)[:, None], pooled


class PoolsPadding(Encoder):
    """Returns the mean of all rows, including padding."""

    def returned(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return logits, logits.mean(1)


class PoolsNothing(Encoder):
    """Returns the logits of the first token instead of a mean."""

    def returned(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return logits, logits[:, 0]


class IgnoresMask(Encoder):
    """Reads the mask, but attends everywhere."""

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(ids, torch.ones_like(mask) + 0 * mask)


def inputs_of(form: str, counts: list[list[int]]) -> Callable[[int, int], dict[str, Tensor]]:
    kept = torch.tensor(counts)
    masks = {
        "counts": kept,
        "hidden": kept == 0,
        "additive": torch.where(kept == 0, LOWEST, 0.0)[:, None, None].expand(B, 1, S, S).clone(),
    }
    return lambda batch, seq: {"ids": torch.randint(0, V, (batch, seq)), "mask": masks[form]}


def made(kind: type[Encoder], form: str = "counts", *, causal: bool = False) -> Encoder:
    torch.manual_seed(0)
    return kind(form, causal=causal).eval()


def reference_of(module: nn.Module, form: str = "counts", counts: list[list[int]] = LEFT) -> Reference:
    torch.manual_seed(0)
    return Reference(model_from_module(module, inputs_of(form, counts), [BUCKET], "masked"))


@functools.cache
def shared_reference(kind: type[Encoder]) -> Reference:
    """The reference of a model in the usual form. Tests do not change it."""
    return reference_of(made(kind))


def padding(reference: Reference, sample: dict[str, np.ndarray] | None = None) -> list[list[int]] | None:
    """The rows that are real in a sample; without one, in the first sample of the model."""
    declared = declared_padding(reference, Batch("sample", BUCKET, sample or reference.model.sample(BUCKET, 0)))
    assert declared is None or declared.declared_by == "mask"
    return None if declared is None else declared.real_BS.astype(int).tolist()


@pytest.mark.fast("additive")
@pytest.mark.parametrize("form", ["counts", "hidden", "additive"])
def test_every_form_of_a_mask_is_understood(form: str) -> None:
    """This includes a causal model, where padding on the left does not depend on real tokens either."""
    reference = reference_of(made(Encoder, form), form)
    assert padding(reference) == LEFT
    assert padding(reference_of(made(Encoder, form, causal=True), form)) == LEFT
    right = {name: tensor.numpy() for name, tensor in inputs_of(form, RIGHT)(B, S).items()}
    assert padding(reference, right) == RIGHT


@pytest.mark.slow
def test_what_a_mask_does_not_hide_is_no_padding() -> None:
    assert padding(reference_of(made(IgnoresMask))) is None
    # Causality hides later tokens, for any mask.
    assert padding(reference_of(made(PoolsNothing, causal=True), counts=RIGHT)) is None
    assert padding(reference_of(made(Encoder), counts=[[1] * S] * B)) is None
    assert padding(reference_of(made(Encoder), counts=[[0] * S, [1] * S])) is None


def test_what_a_pooled_output_reads_is_no_padding() -> None:
    assert padding(shared_reference(PoolsPadding)) is None


def judged(module: nn.Module, reference: Reference) -> ParityRow:
    state, example = state_of(module), tuple(inputs_of("counts", LEFT)(B, S).values())
    model = onnx_from_captured(captured(module, example, "test"), state, ["ids", "mask"], reference.output_names)
    for name, value in model.graph.initializers.items():
        if name in state:
            value.const_value = ir.tensor(state[name].detach().numpy(), name=name)
    with OrtRunner(session(model), "candidate", 1) as runner:
        batches = batches_of(reference, BUCKET, CONFIG)
        return judge_runner([(runner, batches)], reference, CONFIG.parity.float32, SETTING)


@pytest.mark.parametrize("kind", [Encoder, OtherPadding])
def test_rows_of_padding_are_not_judged(kind: type[Encoder]) -> None:
    row = judged(made(kind), shared_reference(Encoder))
    assert row.reasons == ()
    (left,) = row.left_out
    assert (left.output, left.inputs, left.rows, left.total) == ("output_0", ("sample", "ties"), 35, 120)
    assert left.because == "mask declares these positions to be padding"
    assert row.tokens == 85


def test_real_rows_are_judged() -> None:
    row = judged(made(WrongRealRow), shared_reference(Encoder))
    assert any("output_0: max abs error 0.001, allowed" in reason for reason in row.reasons), row.reasons


def test_a_mask_that_hides_nothing_leaves_every_row_judged() -> None:
    row = judged(made(OtherPadding), shared_reference(PoolsPadding))
    assert any("output_0: max abs error nan" in reason for reason in row.reasons), row.reasons
    assert row.left_out == ()
    assert np.isnan(row.error.max_abs)
