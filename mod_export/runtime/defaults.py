"""Defaults from a model's generation_config.json: the tokens that end its texts, and how to sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mod_export.errors import UsageError
from mod_export.runtime.logits import Sampling
from mod_export.runtime.tokenizer import read_json

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Generation settings that apply unless a request overrides them.

    Attributes:
        stop_ids: tokens that end a text.
        temperature: 0 (greedy), unless `do_sample` is true in the file; then the file's value, or 1.
        top_k: the file's value, or 0 (all tokens).
        top_p: the file's value, or 1 (all tokens).
    """

    stop_ids: frozenset[int]
    temperature: float
    top_k: int
    top_p: float

    def sampling_of(self, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
        """Returns the sampling of a request, with the model's default in place of each None.

        Raises:
            UsageError: a value is out of range.
        """
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
        )


def defaults_of(folder: Path, end: int | None) -> GenerationDefaults:
    """Reads the defaults from a folder. `end`, the tokenizer's end-of-text token, is used if the file names none.

    Raises:
        UsageError: the file cannot be read, or holds a value that is invalid.
    """
    path = folder / GENERATION_CONFIG
    config = read_json(path)
    listed = config.get("eos_token_id")
    ids = [end] if listed is None else listed if isinstance(listed, list) else [listed]
    wrong = [token for token in ids if token is not None and not _is_id(token)]
    if wrong:
        raise UsageError(f"{path}: eos_token_id: expected a token id, or a list of them, got {wrong[0]!r}")
    settings = {name: config[name] for name in ("temperature", "top_k", "top_p") if config.get(name) is not None}
    try:
        sampling = Sampling(**{"temperature": 1.0, **settings})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    stop_ids = frozenset(token for token in ids if token is not None)
    temperature = sampling.temperature if config.get("do_sample") is True else 0.0
    return GenerationDefaults(stop_ids, temperature, sampling.top_k, sampling.top_p)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
