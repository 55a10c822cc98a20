"""What generation_config.json says of a model: the tokens that end its texts, and how it is meant to be sampled."""

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
    """What holds unless a request says otherwise.

    Attributes:
        stop_ids: tokens that end a text.
        temperature: 0, which is greedy, unless `do_sample` is true in the file; then as it says, else 1.
        top_k: of the file, else 0, which is all.
        top_p: of the file, else 1, which is all.
    """

    stop_ids: frozenset[int]
    temperature: float
    top_k: int
    top_p: float

    def sampling_of(self, temperature: float | None, top_k: int | None, top_p: float | None) -> Sampling:
        """That of a request, in which None stands for what the model says.

        Raises:
            UsageError: one of them is out of its range.
        """
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
        )


def defaults_of(folder: Path, end: int | None) -> GenerationDefaults:
    """Of the file in a folder; `end`, the end-of-text token of the tokenizer, counts where the file names none.

    Raises:
        UsageError: the file cannot be read, or says something else than tokens and numbers.
    """
    path = folder / GENERATION_CONFIG
    config = read_json(path)
    listed = config.get("eos_token_id")
    ids = [end] if listed is None else listed if isinstance(listed, list) else [listed]
    wrong = [one for one in ids if one is not None and not _is_id(one)]
    if wrong:
        raise UsageError(f"{path}: eos_token_id: expected a token id, or a list of them, got {wrong[0]!r}")
    given = {name: config[name] for name in ("temperature", "top_k", "top_p") if config.get(name) is not None}
    try:
        sampled = Sampling(**{"temperature": 1.0, **given})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    stop_ids = frozenset(one for one in ids if one is not None)
    temperature = sampled.temperature if config.get("do_sample") is True else 0.0
    return GenerationDefaults(stop_ids, temperature, sampled.top_k, sampled.top_p)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
