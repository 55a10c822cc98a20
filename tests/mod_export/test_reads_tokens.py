"""Only graphs that read token ids, and answer for each token or for the last, may be asked whether they write text."""

from __future__ import annotations

import pytest

from mod_export.types import Bucket, Graph, Outputs

IDS = ("int64", (2, 16))


@pytest.mark.parametrize(
    ("inputs", "result", "outputs", "expected"),
    [
        ({"ids": IDS, "lengths": ("int64", (2,))}, (2, 16, 40), "logits", True),
        ({"ids": IDS}, (2, 40), "last", True),
        ({"ids": IDS}, (2, 40), "logits", False),
        ({"x": ("float32", (2, 16, 8))}, (2, 16, 8), "logits", False),
        ({"images": ("float32", (2, 16, 32, 32)), "size": ("int64", (2,))}, (2, 16, 10), "logits", False),
        ({}, (), "logits", False),
    ],
)
def test_ids_in_and_an_answer_for_tokens_out(
    inputs: dict[str, tuple[str, tuple[int, ...]]], result: tuple[int, ...], outputs: Outputs, expected: bool
) -> None:
    graph = Graph(
        path="graphs/mod.onnx", model="mod", bucket=Bucket(2, 16), dtype="float32", target=None,
        inputs=inputs, results={"y": result} if result else {}, outputs=outputs,
    )  # fmt: skip
    assert graph.reads_tokens == expected
