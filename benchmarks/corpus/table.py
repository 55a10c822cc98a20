"""All entries of the corpus by name."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.corpus import decoders, diffusion, encoders, hybrids, others, senses, torch_nn, x_decoders
from benchmarks.corpus.entry import Entry

_MODULES = (decoders, hybrids, encoders, senses, x_decoders, diffusion, torch_nn, others)
ENTRIES: Mapping[str, Entry] = {entry.name: entry for module in _MODULES for entry in module.ENTRIES}
