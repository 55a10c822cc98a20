"""Where the selected tokens run in the order of their scores, engines must keep that order."""

from __future__ import annotations

import functools

import onnx
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
from mod_export.judge.inputs import batches_of
from mod_export.judge.parity import judge_runner
from mod_export.judge.reference import Reference
from mod_export.model.module import model_from_module
from mod_export.rows.correctness import ParityRow
from mod_export.types import Bucket, Setting

D, V, K = 8, 40, 4
BUCKET = Bucket(2, 16)
CONFIG = config_from_toml(None)
SETTING = Setting(target="ort-cpu", dtype="float32", model="mod", role="forward", bucket=BUCKET)


class Block(nn.Module):
    """Each selected token sees those that were selected before it, in the order of the selection."""

    def __init__(self, select: str) -> None:
        super().__init__()
        self.router, self.mix, self.select = nn.Linear(D, 1), nn.Linear(D, D), select

    def forward(self, x: Tensor) -> Tensor:
        score_BS = self.router(x)[..., 0]
        if self.select == "best last":
            index = score_BS.sort(1).indices[:, -K:]
        else:
            index = score_BS.topk(K, 1, sorted=self.select == "best first").indices
        index = index[..., None].expand(-1, -1, D)
        return x.scatter_add(1, index, torch.tanh(self.mix(x.gather(1, index))).cumsum(1))


class Model(nn.Module):
    def __init__(self, select: str) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(V, D), Block(select), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


def made(select: str) -> Model:
    torch.manual_seed(0)
    return Model(select).eval()


def ids_of(batch: int, seq: int) -> Tensor:
    return torch.randint(0, V, (batch, seq))


@functools.cache
def reference_of(select: str) -> Reference:
    return Reference(model_from_module(made(select), ids_of, [BUCKET], "ordered"))


@functools.cache
def proto_of(select: str) -> onnx.ModelProto:
    """The graph of a model, with its weights in it."""
    module = made(select)
    state = state_of(module)
    graph = onnx_from_captured(captured(module, (ids_of(2, 16),), "test"), state, ["ids"], ["logits"])
    for name, tensor in state.items():
        graph.graph.initializers[name].const_value = ir.tensor(tensor.detach().numpy(), name=name)
    return ir.to_proto(graph)


def judged(reference: Reference, select: str) -> ParityRow:
    """Judges the graph of another model with the same weights on ONNX Runtime."""
    assert reference.output_names == ("logits",)
    with OrtRunner(session(ir.from_proto(proto_of(select))), "candidate", 1) as runner:
        return judge_runner(
            [(runner, batches_of(reference, BUCKET, CONFIG))], reference, CONFIG.parity.float32, SETTING
        )


@pytest.mark.parametrize(("select", "other"), [("best first", "best last"), ("best last", "best first")])
def test_the_same_tokens_in_another_order_are_a_fault(select: str, other: str) -> None:
    """The reference runs with the order of the candidate, so no other number shows it."""
    reference = reference_of(select)
    sound, wrong = judged(reference, select), judged(reference, other)
    assert sound.passed, sound.reasons
    assert wrong.error.max_abs <= wrong.allowed_max_abs
    assert wrong.reasons
    assert all("neighbouring tokens are in the wrong order of score" in reason for reason in wrong.reasons)
    (layer,) = wrong.routing.layers
    assert layer.faults > 0
    assert layer.worst_flip > layer.score_bound


@pytest.mark.parametrize("engine", ["any", "best first", "best last"])
def test_a_top_k_that_does_not_sort_defines_no_order(engine: str) -> None:
    """Even if the reference happens to return its tokens in the order of their scores."""
    row = judged(reference_of("any"), engine)
    assert row.passed, row.reasons
