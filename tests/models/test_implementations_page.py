"""docs/models.md names all implementations, and agrees with what a conversion finds in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_implementations import CAUSAL, MODELS

from mod_models.convert.implementations import IMPLEMENTATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
TABLE = "name | repository | a selected token becomes"


def rows(heading: str) -> dict[str, list[str]]:
    """Rows of the table with these first heading cells: first cell -> other cells."""
    lines = PAGE[PAGE.index(f"\n| {heading}") + 1 :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip("`"): others for first, *others in cells}


def test_every_implementation_is_on_the_page() -> None:
    read = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.read]
    assert [*rows(TABLE)] == read
    refused = ", ".join(f"`{name}`" for name in IMPLEMENTATIONS if name not in read)
    assert f"{' and '.join(refused.rsplit(', ', 1))} are recognised and refused" in " ".join(PAGE.split())


@pytest.mark.parametrize(("name", "cells"), rows(TABLE).items())
def test_what_it_says_of_text(name: str, cells: list[str]) -> None:
    """test_implementations.py measures `CAUSAL`."""
    causal = {MODELS[model][0] for model in CAUSAL}
    assert cells[4:] == (["yes"] if name in causal else ["no"])


@pytest.mark.parametrize(("name", "cells"), rows(TABLE).items())
def test_which_capacity_has_to_be_given(name: str, cells: list[str]) -> None:
    needed = {implementation for implementation, _, capacity in MODELS.values() if capacity is not None}
    assert (cells[3] == "has to be given") == (name in needed)
