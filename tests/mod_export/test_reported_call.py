"""A build from Python, as the report describes it."""

from __future__ import annotations

from pathlib import Path

import torch

from mod_export.api import _call


def token_ids(batch: int, seq: int) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


def test_what_can_be_written_is_and_the_rest_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    arguments = {"inputs": token_ids, "baseline": model, "samples": None, "buckets": [(1, 2)], "out": Path("a/b")}
    assert _call(model, arguments) == (
        "mod_export.build(Linear, inputs=token_ids, baseline=Linear, buckets=[(1, 2)], out='a/b')"
    )
    files = ["a.pt2", Path("b.pt2")]
    assert _call(files, {"inputs": torch.ones(2), "baseline": ["d.pt2"], "samples": "it's.safetensors"}) == (
        """mod_export.build(['a.pt2', 'b.pt2'], inputs=Tensor, baseline=['d.pt2'], samples="it's.safetensors")"""
    )
    assert _call("m.py:make", {"inputs": lambda batch, seq: token_ids(batch, seq)}) == (
        "mod_export.build('m.py:make', inputs=inputs)"
    )
