"""Generators on the folder that writes text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from writing import eager

from mod_export.model.model import GeneratingModel, Model
from mod_export.runtime.generator import Generator, load_generator


@pytest.fixture(scope="module")
def generator(written: Path) -> Iterator[Generator]:
    with load_generator(written) as found:
        yield found


@pytest.fixture(scope="session")
def writer(writing_model: Model) -> GeneratingModel:
    """The eager model, which decides about one token at a time."""
    return eager(writing_model)
