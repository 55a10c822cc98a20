"""Servers that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server, serving

from mod_export.runtime.generator import Generator, load_generator


@pytest.fixture(scope="module")
def server(written: Path) -> Iterator[Server]:
    """A server of the folder that writes text."""
    with serving(written) as found:
        yield found


@pytest.fixture(scope="module")
def other(written: Path) -> Iterator[Generator]:
    """A generator on the same folder, which writes the expected texts."""
    with load_generator(written) as found:
        yield found
