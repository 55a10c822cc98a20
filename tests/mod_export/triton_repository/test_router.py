"""How a router pads a request to a bucket and cuts the result back, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from mod_export.triton.router import Buckets

SHAPES = {"b1s4": (1, 4), "b2s4": (2, 4), "b1s16": (1, 16)}
TOKENS = Buckets(
    {
        "inputs": {
            name: {"input_ids": ["INT64", [rows, seq]], "lengths": ["INT64", [rows]]}
            for name, (rows, seq) in SHAPES.items()
        },
        "outputs": ["logits"],
        "vocab_size": 10,
        "positions": True,
    }
)
IMAGES = Buckets(
    {
        "inputs": {"b1s4": {"pixels": ["FP32", [1, 3, 4]]}, "b2s4": {"pixels": ["FP32", [2, 3, 4]]}},
        "outputs": ["logits"],
        "vocab_size": None,
        "positions": True,
    }
)


def ids(*shape: int) -> np.ndarray:
    return np.ones(shape, dtype=np.int64)


@pytest.mark.parametrize(("shape", "bucket"), [((1, 1), "b1s4"), ((1, 4), "b1s4"), ((2, 3), "b2s4"), ((1, 5), "b1s16")])
def test_the_smallest_bucket_that_holds_a_request(shape: tuple[int, int], bucket: str) -> None:
    name, feeds = TOKENS.route({"input_ids": ids(*shape)})
    assert name == bucket
    assert feeds["input_ids"].shape == SHAPES[bucket]
    assert feeds["input_ids"].sum() == shape[0] * shape[1]
    expected = [shape[1]] * shape[0] + [1] * (SHAPES[bucket][0] - shape[0])
    assert feeds["lengths"].tolist() == expected


def test_results_are_cut_back() -> None:
    request = {"input_ids": ids(1, 3)}
    assert TOKENS.cut({"logits": np.zeros((2, 4, 10))}, request)["logits"].shape == (1, 3, 10)
    TOKENS.positions = False
    assert TOKENS.cut({"logits": np.zeros((2, 10))}, request)["logits"].shape == (1, 10)
    TOKENS.positions = True
    assert IMAGES.cut({"logits": np.zeros((2, 10))}, {})["logits"].shape == (2, 10)


def test_other_inputs_have_the_shapes_of_a_bucket() -> None:
    assert IMAGES.route({"pixels": np.zeros((2, 3, 4))})[0] == "b2s4"
    with pytest.raises(ValueError, match=r"no bucket was built for \{'pixels': \[3, 3, 4\]\}; built: b1s4, b2s4"):
        IMAGES.route({"pixels": np.zeros((3, 3, 4))})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": ids(1, 0)}, r"expected token ids \(batch, sequence\), got \[1, 0\]"),
        ({"input_ids": ids(1, 2) * 10}, "expected token ids from 0 to 9, got 10 to 10"),
        ({"input_ids": -ids(1, 2)}, "expected token ids from 0 to 9, got -1 to -1"),
        ({"input_ids": ids(1, 2), "lengths": ids(2)}, r"expected 1 lengths from 1 to 2, got \[1, 1\]"),
        ({"input_ids": ids(1, 2), "lengths": 3 * ids(1)}, r"expected 1 lengths from 1 to 2, got \[3\]"),
        (
            {"input_ids": ids(3, 4)},
            r"no bucket holds a batch of 3 x 4 tokens; built: b1s4, b2s4, b1s16. Build a larger",
        ),
    ],
)
def test_refusals(given: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TOKENS.route(given)
