"""What generation_config.json says about the end of texts and about sampling."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mod_export.errors import UsageError
from mod_export.runtime.logits import Sampling
from mod_export.runtime.request import GenerationDefaults, defaults_of


def read(folder: Path, config: Any, end: int | None = None) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return defaults_of(folder, end)


@pytest.mark.parametrize(("config", "end", "stop_ids"), [
    ({"eos_token_id": 2}, 7, {2}),
    ({"eos_token_id": [2, 5]}, 7, {2, 5}),
    ({"eos_token_id": 0}, 7, {0}),
    ({"eos_token_id": None}, 7, set()),
    ({}, 7, {7}),
    ({}, None, set()),
    ({"eos_token_id": []}, 7, set()),
])  # fmt: skip
def test_what_ends_a_text(tmp_path: Path, config: dict[str, Any], end: int | None, stop_ids: set[int]) -> None:
    assert read(tmp_path, config, end).stop_ids == stop_ids


def test_without_the_file_the_tokenizers_end_counts(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, 3) == GenerationDefaults(frozenset([3]), 0.0, 0, 1.0)
    assert defaults_of(tmp_path, None).stop_ids == frozenset()


@pytest.mark.parametrize(("config", "expected"), [
    ({}, (0.0, 0, 1.0)),
    ({"temperature": 0.6, "top_p": 0.9}, (0.0, 0, 0.9)),
    ({"do_sample": True}, (1.0, 0, 1.0)),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, (0.6, 20, 0.9)),
    ({"do_sample": True, "temperature": None, "top_k": None}, (1.0, 0, 1.0)),
    ({"do_sample": False, "temperature": 0.6}, (0.0, 0, 1.0)),
])  # fmt: skip
def test_how_a_model_is_meant_to_be_sampled(tmp_path: Path, config: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Sampling is greedy unless the file says `do_sample`; a request overrides the file."""
    found = read(tmp_path, config)
    assert (found.temperature, found.top_k, found.top_p) == expected
    assert found.sampling_of(None, None, None) == Sampling(*expected)
    assert found.sampling_of(0.5, 3, 0.25) == Sampling(0.5, 3, 0.25)
    assert found.sampling_of(0.0, None, None).temperature == 0


@pytest.mark.parametrize(("config", "message"), [
    ({"eos_token_id": "x"}, "eos_token_id: expected a token id, or a list of them, got 'x'"),
    ({"eos_token_id": [1, True]}, "eos_token_id: expected a token id, or a list of them, got True"),
    ({"eos_token_id": -1}, "eos_token_id: expected a token id, or a list of them, got -1"),
    ({"temperature": "hot"}, "temperature: got 'hot', expected"),
    ({"top_p": 3}, "top_p: got 3, expected"),
    ([], "expected a JSON object, got list"),
])  # fmt: skip
def test_what_is_no_such_file(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"generation_config\.json: {re.escape(message)}"):
        read(tmp_path, config)
