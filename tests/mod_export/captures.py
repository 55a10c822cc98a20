"""Captures a module of token ids at a given shape."""

from __future__ import annotations

from typing import Any

import torch

from mod_export.graph.capture import Captured, captured
from mod_export.graph.weights import state_of
from mod_export.types import Bucket, DType


def bucket_example(module: torch.nn.Module, bucket: Bucket, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (input_ids, lengths) of a bucket whose rows all have `length` tokens."""
    # A row may be full, short or one token long; the graph must not depend on it.
    device = next((tensor.device for tensor in state_of(module).values()), None)
    ids_BS = torch.zeros((bucket.batch, bucket.seq), dtype=torch.int64, device=device)
    return ids_BS, torch.full((bucket.batch,), length, device=device)


def captured_module(module: torch.nn.Module, bucket: Bucket, name: str, dtype: DType = "float32") -> Captured:
    """Runs `capture.captured` with full rows."""
    return captured(module, bucket_example(module, bucket, bucket.seq), f"{name} at {bucket.name}", dtype=dtype)


def ports(bucket: Bucket, vocab_size: int) -> dict[str, Any]:
    """`inputs` and `results` of a graph that reads and scores whole rows of tokens."""
    B, S = bucket.batch, bucket.seq
    return {
        "inputs": {"input_ids": ("int64", (B, S)), "lengths": ("int64", (B,))},
        "results": {"logits": (B, S, vocab_size)},
    }
