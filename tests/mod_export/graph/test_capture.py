from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import bucket_example, captured_module
from small_graphs import Does, TwoWays
from torch import Tensor

from mod_export.errors import CaptureError
from mod_export.graph.capture import CaptureProof, captured, prove_static
from mod_export.model.model import Model
from mod_export.types import Bucket
from mod_models.selection import select_topk

BUCKET = Bucket(2, 8)


class Counts(torch.nn.Module):
    """A model that computes something else on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        self.calls += 1
        return ids_BS * self.calls


def broken(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return ids_BS * 2


def branching(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
    return ids_BS if lengths_B[0] > 4 else ids_BS + 1


def mismatched(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
    return ids_BS @ lengths_B


def proved(module: torch.nn.Module, bucket: Bucket, name: str) -> CaptureProof:
    """Proof from examples of full rows and of rows with a single token."""
    examples = [bucket_example(module, bucket, length) for length in (bucket.seq, 1)]
    return prove_static(module, examples, f"{name} at {bucket.name}")


@pytest.mark.parametrize(("kind", "bucket"), [("mod", Bucket(3, 7)), ("dense", Bucket(1, 64))])
def test_a_model_is_one_static_graph(model: Model, kind: Any, bucket: Bucket) -> None:
    module = {"mod": model, "dense": model.dense()}[kind].module()
    assert proved(module, bucket, kind) == CaptureProof(graphs=1, graph_breaks=0, recompiles=0)


STATIC = "mod at b2s8: no static graph because of "


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Does(broken), "mod at b2s8: torch cannot capture the model at "),
        (Does(branching), STATIC),
        (Does(mismatched), "mod at b2s8: the model itself fails with these inputs at "),
        (Counts(), STATIC),
    ],
    ids=["break", "branch", "shapes", "recompiled"],
)
def test_what_is_not_one_static_graph_is_refused(module: torch.nn.Module, words: str) -> None:
    """tests/mod_export/porting tests the reasons and the advice that these messages give."""
    with pytest.raises(CaptureError, match=words + __file__):
        proved(module, BUCKET, "mod")


def test_without_torch_compile_nothing_is_proven(model: Model) -> None:
    message = r"mod at b2s8: expected 1 graph, no breaks and no recompiles, got CaptureProof\(graphs=0"
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match=message):
        proved(model.module(), BUCKET, "mod")


def test_the_selection_and_every_size_are_captured_as_they_are() -> None:
    def select(ids_BS: Tensor, lengths_B: Tensor) -> Tensor:
        real_BS = torch.arange(ids_BS.shape[1]) < lengths_B[:, None]
        return select_topk(ids_BS.float(), real_BS, 3)[0]

    program = captured_module(Does(select), BUCKET, "mod").program
    ids_BS, lengths_B = torch.randint(0, 3, (2, 8)), torch.tensor([8, 2])
    (index_BK,) = program.module()(ids_BS, lengths_B)
    assert torch.equal(index_BK, select(ids_BS, lengths_B))
    assert program.range_constraints == {}
    inputs = [node.meta["val"].shape for node in program.graph.nodes if node.name in ("ids_bs", "lengths_b")]
    assert inputs == [torch.Size([2, 8]), torch.Size([2])]


def two_examples(device: str) -> list[tuple[Tensor, Tensor]]:
    flags = (torch.tensor([True, False]), torch.tensor([False, False]))
    return [(torch.ones(2, 2, device=device), flag.to(device)) for flag in flags]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_conditions_are_one_graph(device: str) -> None:
    """With values, both examples give the same graph; without values (meta), no condition can be evaluated."""
    module = TwoWays().to(device)
    assert prove_static(module, two_examples(device), "a step") == CaptureProof(graphs=1, graph_breaks=0, recompiles=0)
    with pytest.raises(CaptureError, match="a step: torch cannot capture the model at "):
        prove_static(Does(broken), two_examples(device), "a step")


def test_any_inputs_are_exported() -> None:
    program = captured(TwoWays().to("meta"), two_examples("meta")[0], "a step").program
    assert not program.range_constraints
    assert any("cond" in str(node.target) for node in program.graph.nodes)
    assert set(program.state_dict) == {"weight"}
    with pytest.raises(CaptureError, match="a step: no static graph because of "):
        captured(Does(branching), (torch.ones(2), torch.ones(2)), "a step")


def test_one_tensor_in_two_places_is_no_example() -> None:
    tensor = torch.ones(2)
    with pytest.raises(AssertionError):
        captured(Does(lambda x, y: x + y), (tensor, tensor), "a step")
