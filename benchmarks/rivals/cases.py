"""Cases of the benchmark of whole rows: sizes of models, and the shapes of their inputs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mod_export.types import Bucket, ModelKind
from mod_models.checkpoint import Checkpoint, load_checkpoint, random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

KINDS: tuple[ModelKind, ...] = ("dense", "mod")
SIZES: dict[str, dict[str, Any]] = {
    "XS": {"d_model": 128, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_head": 64, "d_ff": 192},
    "S": {"d_model": 256, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "d_head": 64, "d_ff": 704},
    "M": {"d_model": 512, "n_layers": 12, "n_heads": 8, "n_kv_heads": 4, "d_head": 64, "d_ff": 1408},
    "L": {"d_model": 1024, "n_layers": 16, "n_heads": 16, "n_kv_heads": 8, "d_head": 64, "d_ff": 2816},
    "1B": {"d_model": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "d_head": 64, "d_ff": 8192},
}
"""Llama-like decoders; every other block is routed at 12.5 %. XS is for tests, and 1B has the shape of Llama-3.2-1B."""
VOCABULARY = 8192


@dataclass(frozen=True)
class Case:
    """Whole rows as the input of a dense and a routed model with initial weights."""

    size: str
    seq: int
    batch: int = 1
    vocab: int = VOCABULARY

    @property
    def name(self) -> str:
        return f"{self.size}-s{self.seq}-b{self.batch}-v{self.vocab}"

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.batch, self.seq)

    @property
    def spec(self) -> ModelSpec:
        sizes = SIZES[self.size]
        return ModelSpec(vocab_size=self.vocab, max_positions=max(self.seq, 128), routing=RoutingSpec(), **sizes)

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        ids_BS = rng.integers(0, self.vocab, (self.batch, self.seq), dtype=np.int64)
        return {"input_ids": ids_BS, "lengths": np.full(self.batch, self.seq, np.int64)}


CASES = (Case("M", 512), Case("M", 128), Case("M", 2048), Case("M", 512, vocab=32_000))
"""M with 512 tokens, and cases that change one thing: fewer tokens, more tokens, a larger vocabulary. All 36
combinations of S, M and L, three lengths, two batches and two vocabularies would take many hours, with every route at
four precisions, at one and at all cores. `--cases` measures any of them."""


@cache
def checkpoints(folder: Path) -> dict[str, Checkpoint]:
    """Returns the models that `write_models` wrote, by kind."""
    return {kind: load_checkpoint(folder / f"{kind}.pt") for kind in KINDS}


def case_of(folder: Path) -> Case:
    """Returns the case of a folder."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def write_models(case: Case, folder: Path) -> None:
    """Writes both models of a case, so that all routes start from the same weights."""
    checkpoint = random_checkpoint(case.spec, 0)
    for kind, model in (("mod", checkpoint), ("dense", checkpoint.dense())):
        save_checkpoint(folder / f"{kind}.pt", model)
    (folder / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
