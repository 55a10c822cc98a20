"""Fields of a spec about blocks other than routing: biases, norms, activations, scaled angles and embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
from plain_specs import WHOLE, plain, problems

from mod_models import declarations, layers
from mod_models.spec import ModelSpec


def test_every_name_has_its_implementation() -> None:
    assert tuple(layers.QK_NORMS) == declarations.QK_NORMS
    assert tuple(layers.ACTIVATIONS) == declarations.ACTIVATIONS
    assert tuple(layers.ROPE_SCALINGS) == declarations.ROPE_SCALINGS


@pytest.mark.parametrize("value", ["Ones", ["ones"], {"a": 1}, None, 0])
def test_unknown_variants(value: object) -> None:
    blocks = {
        "attention_bias": tuple(declarations.ATTENTION_BIASES), "qk_norm": declarations.QK_NORMS,
        "activation": declarations.ACTIVATIONS,
    }  # fmt: skip
    assert problems(plain(**dict.fromkeys(blocks, value))) == [
        f"spec.{name}: unknown variant {value!r}; known: {', '.join(table)}" for name, table in blocks.items()
    ]
    (kind,) = problems(plain(rope_scaling={"kind": value, "factor": 2.0}))
    assert kind == f"spec.rope_scaling.kind: unknown variant {value!r}; known: linear, llama3"


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e39, "1", None, True])
def test_numbers(value: object) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    assert problems(plain(rope_scaling={"kind": "llama3", **dict.fromkeys(names, value)})) == [
        f"spec.rope_scaling.{name}: expected a number above 0, got {value!r}" for name in names
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"low_freq_factor": 4.0}, "low_freq_factor: expected less than high_freq_factor 4.0, got 4.0"),
        ({"original_positions": 0}, f"original_positions: {WHOLE.format(1, 2**24, 0)}"),
        ({"facto": 2.0}, "facto: unknown field, did you mean 'factor'?"),
    ],
    ids=str,
)
def test_rope_scaling_is_refused(changes: dict[str, Any], said: str) -> None:
    scaling = {"kind": "llama3", "factor": 8.0, **changes}
    assert problems(plain(rope_scaling=scaling)) == [f"spec.rope_scaling.{said}"]


def test_rope_scaling_needs_a_kind_and_a_factor() -> None:
    missing = ["spec.rope_scaling.kind: missing", "spec.rope_scaling.factor: missing"]
    assert problems(plain(rope_scaling={})) == missing


def test_specs_from_before_these_fields_mean_what_they_did() -> None:
    new = ("rope_scaling", "attention_bias", "qk_norm", "activation", "mlp_bias", "embedding_scale")
    old = {name: value for name, value in plain().items() if name not in new}
    assert ModelSpec.from_dict(old) == ModelSpec.from_dict(plain())
    assert {name: plain()[name] for name in new} == {
        "rope_scaling": None, "attention_bias": "none", "qk_norm": "none", "activation": "silu", "mlp_bias": False,
        "embedding_scale": 1.0,
    }  # fmt: skip
