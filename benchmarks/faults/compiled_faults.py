"""AOTInductor packages of models whose results do not follow from their weights and spec."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from captures import captured_module, ports
from mod_dialects import Model
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.faults.base_folder import SPEC, STD, checkpoint_with, compiled_foreign, foreign_folder, foreign_module
from mod_export.config import config_from_toml
from mod_export.engines.inductor import Inductor
from mod_export.engines.protocol import EngineJob
from mod_export.types import Bucket, Graph, Variant
from mod_models import transformer
from mod_models.layers import Attention
from mod_models.selection import select_topk
from mod_models.transformer import Transformer


class Acausal(Attention):
    """Attention without the causal mask."""

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, (k, v) = self.queries(x_BTD, cos, sin), self.keys_values(x_BTD, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), k, v


def later_ties(score_BS: Tensor, real_BS: Tensor, k: int) -> tuple[Tensor, Tensor]:
    index_BK, _ = select_topk(score_BS.flip(1), real_BS.flip(1), k)
    index_BK = (score_BS.shape[1] - 1 - index_BK).flip(1)
    return index_BK, torch.gather(real_BS, 1, index_BK)


def no_padding(score_BS: Tensor, real_BS: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return select_topk(score_BS, torch.ones_like(real_BS), k)


def residual(module: Transformer) -> None:
    block = module.layers[1]
    # Mypy takes every attribute of a module for a tensor or a module.
    block.routing = replace(block.routing, combine="double_residual")


def mask(module: Transformer) -> None:
    module.layers[2].attention.__class__ = Acausal


class LargeGates(nn.Linear):
    """A router whose scores are 1 % too large. It selects the same tokens; only the gates change."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return super().forward(x_BSD) * 1.01


def foreign_gate(module: Model) -> None:
    module.blocks[1].router.__class__ = LargeGates


def foreign_mask(module: Model) -> None:
    module.blocks[2].causal = False


def write_packages(folder: Path) -> None:
    """Compiles every faulty model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for title, spoil in (("foreign gate", foreign_gate), ("foreign mask", foreign_mask)):
        module = foreign_module()
        spoil(module)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = foreign_folder(partial(compiled_foreign, module=module), Path(scratch))
            shutil.copy(next((built / "engines/inductor").glob("mod-*.pt2")), folder / f"{title}.pt2")
    changes: dict[str, Callable[[Transformer], None]] = {"residual": residual, "mask": mask}
    selections = {"ties": later_ties, "pads": no_padding}
    for name in (*changes, *selections):
        module = checkpoint_with(SPEC, 1, STD).module()
        changes.get(name, lambda module: None)(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer, "select_topk", selections.get(name, select_topk))
            program = captured_module(module, Bucket(2, 32), name).program
        graph = Graph(
            path="",
            model="mod",
            bucket=Bucket(2, 32),
            dtype="float32",
            target=None,
            k_by_layer=SPEC.k_by_layer(32),
            **ports(Bucket(2, 32), SPEC.vocab_size),
        )
        job = EngineJob(root=folder, graph=graph, program=lambda dtype, program=program: program)
        Inductor().build(job, Variant(dtype="float32"), folder / f"{name}.pt2", config_from_toml(None))
