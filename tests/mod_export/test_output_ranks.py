"""Outputs of any rank and dtype, from the build to the arrays that `infer` returns."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import FEW_SAMPLES
from torch import Tensor, nn

import mod_export
from mod_export.api import build
from mod_export.folder.manifest import open_folder
from mod_export.folder.ports import ports_of
from mod_export.triton.config import TritonModel, config_text

SHAPE, D, V = (2, 16), 16, 40
RANKS = [
    "(2, 16)", "(2, 16, 40)", "()", "()", "()", "()", "(2,)", "(2, 0, 16)", "(2, 16)", "(2, 16)", "()", "(16,)", "(3,)"
]  # fmt: skip
DTYPES = [
    "int64", "float32", "float32", "int64", "bool", "int32", "float32", "float32", "bool", "int64", "float32",
    "float32", "int64",
]  # fmt: skip


class Ranks(nn.Module):
    """Returns positions, logits (B, S, V), and beside them a loss, a count in int64 and in int32, a bool, a score of
    each row, an empty slice, which tokens have a positive score, and the next ids. Then a scale, a weight and an order,
    which depend on no input like the positions; and the number of layers, which engines leave out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(V, D), nn.Linear(D, 1)
        self.mlp, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> tuple[Tensor | int, ...]:
        x = self.embedding(ids)
        score_BS = self.router(x)[..., 0]
        index_BK = score_BS.topk(4).indices
        wide = index_BK[..., None].expand(-1, -1, D)
        x = x.scatter_add(1, wide, self.mlp(x.gather(1, wide)) * score_BS.gather(1, index_BK).sigmoid()[..., None])
        positive = score_BS > 0
        loss = score_BS.logsumexp(-1).pow(2).mean()
        count = positive.sum()
        return (
            torch.arange(ids.shape[1]).expand(ids.shape), self.head(x), loss, count, positive.any(),
            count.to(torch.int32), score_BS.mean(1), x[:, :0], positive, ids + 1, self.router.bias[0].exp(),
            self.mlp.bias, torch.arange(3), 1,
        )  # fmt: skip


def ids_of(batch: int, seq: int) -> Tensor:
    """No id occurs twice: equal tokens would have equal scores, and either could be selected."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(3))[: batch * seq].reshape(batch, seq)


def check_ranks(tmp_path: Path, targets: list[str]) -> Path:
    torch.manual_seed(0)
    module, out = Ranks().eval(), tmp_path / "built"
    (tmp_path / "c.toml").write_text(f"targets = {targets}\n{FEW_SAMPLES}", encoding="utf-8")
    report = build(module, ids_of, [SHAPE], out=out, config=tmp_path / "c.toml")
    assert report.verdict.status == "pass", report.verdict.reasons
    # The router reads later tokens. That shows in the logits and not in the positions.
    assert {row.causal for row in report.causality} == {False}
    ids = ids_of(*SHAPE)
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in module(ids) if isinstance(tensor, Tensor)]
    assert [(str(one.shape), one.dtype.name) for one in expected] == list(zip(RANKS, DTYPES, strict=True))
    for target in targets:
        for threads in (1, 3):
            with mod_export.load(out, target=target, threads=threads) as deployment:
                found = list(deployment.infer({"ids": ids.numpy()}).values())
            assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
            for array, reference in zip(found, expected, strict=True):
                np.testing.assert_allclose(array, reference, atol=1e-5)
    return out


@pytest.mark.slow
def test_outputs_of_any_rank(tmp_path: Path) -> None:
    out = check_ranks(tmp_path, ["ort-cpu", "openvino"])
    graph = open_folder(out).graphs[0]
    inputs, outputs = ports_of(out / graph.path)
    assert [str(port.dims) for port in outputs[: len(RANKS)]] == RANKS
    model = TritonModel(
        name="ranks", about="", backend="onnxruntime", inputs=inputs, outputs=outputs, files={}, max_queue=1
    )
    # Triton accepts no tensor without dimensions.
    assert config_text(model).count("dims: [1] reshape: { shape: [ ] } }") == RANKS.count("()")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_outputs_of_any_rank_of_a_compiled_package(tmp_path: Path) -> None:
    """Compiles with one thread and runs with several: a loss has no loop to divide among threads."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        check_ranks(tmp_path, ["inductor"])
    finally:
        torch.set_num_threads(threads)
