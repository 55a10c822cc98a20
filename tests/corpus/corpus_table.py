"""Every entry of the corpus, by its name."""

from __future__ import annotations

from collections.abc import Mapping

import corpus_decoders
import corpus_diffusers
import corpus_encoders
import corpus_others
import corpus_senses
import corpus_torch
import corpus_x_transformers
from corpus_entry import Entry

_MODULES = (
    corpus_decoders, corpus_encoders, corpus_senses, corpus_x_transformers, corpus_diffusers, corpus_torch,
    corpus_others,
)  # fmt: skip
ENTRIES: Mapping[str, Entry] = {entry.name: entry for module in _MODULES for entry in module.ENTRIES}
