"""Generators on the folder that writes text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from writing import eager

from mod_export.runtime.generate.generator import Generator, load_generator
from mod_export.sources.model import Model
from mod_export.sources.protocol import GeneratingModel


@pytest.fixture(scope="module")
def generator(written: Path) -> Iterator[Generator]:
    with load_generator(written) as found:
        yield found


@pytest.fixture(scope="session")
def writer(writing_model: Model) -> GeneratingModel:
    """The eager model, as it decides about one token at a time."""
    return eager(writing_model)
