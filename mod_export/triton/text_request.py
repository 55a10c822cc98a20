"""Turns the tensors of a request into a text that can be written."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from mod_export.errors import UsageError
from mod_export.runtime.generator import Generator
from mod_export.runtime.rows import Text

MOST_NEW_TOKENS = 128
"""Number of new tokens if a request does not set it; fewer if the window has no room for them."""
SAMPLING = {"temperature": float, "top_p": float, "top_k": int}


def texts_of(generator: Generator, given: Mapping[str, np.ndarray]) -> list[Text]:
    """Returns a list with the one text of a request.

    Args:
        generator: writes the text.
        given: inputs of the request: `text` or `input_ids`, and optionally `max_tokens`, `temperature`, `top_p`,
            `top_k`, `seed` and `stop`.

    Raises:
        UsageError: an input is invalid.
    """
    if ("text" in given) == ("input_ids" in given):
        raise UsageError(f"expected either text or input_ids, got {'both' if 'text' in given else 'neither'}")
    prompt = _string("text", given["text"][0]) if "text" in given else [given["input_ids"].tolist()]
    options: dict[str, Any] = {name: kind(given[name][0]) for name, kind in SAMPLING.items() if name in given}
    options["seed"] = int(given["seed"][0]) if "seed" in given else secrets.randbits(31)
    options["stop"] = [_string("stop", value) for value in given.get("stop", ())]
    if "max_tokens" in given:
        return generator.texts(prompt, max_new_tokens=int(given["max_tokens"][0]), **options)
    (text,) = generator.texts(prompt, max_new_tokens=1, **options)
    # The last new token is never read, so a text may have one more token than the window has room for.
    room = generator.window - len(text.completion.prompt_ids) + 1
    return generator.texts(prompt, max_new_tokens=min(MOST_NEW_TOKENS, room), **options)


def _string(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: expected UTF-8, got a byte that is not at position {error.start}") from error
