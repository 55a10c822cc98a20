"""Changed files of a captured model in its build folder: `validate` names them and never fails by itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from command_line import FEW_SAMPLES, invoke, refused, toml_file
from foreign_models import made, token_ids

import mod_export.pipeline.rerun
from mod_export.folder.programs import read_arrays, write_arrays

pytestmark = pytest.mark.usefixtures("searching_few_rows")
GRAPH, SAMPLES, CONSTANTS = (f"programs/mod-{name}" for name in ("b1s8.json", "samples.npz", "constants.npz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    config = toml_file(folder, f'targets = ["ort-cpu"]\n{FEW_SAMPLES}')
    mod_export.build(made("index_put"), token_ids, [(1, 8)], out=folder / "built", config=config, verbosity=-1)
    return folder / "built"


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "moved"))


def _samples(change: Callable[[str, np.ndarray], Mapping[str, np.ndarray]]) -> Callable[[Path], None]:
    def changed(root: Path) -> None:
        found = [change(name, array) for name, array in read_arrays(root / SAMPLES).items()]
        write_arrays(root / SAMPLES, {name: array for data in found for name, array in data.items()})

    return changed


NO_REFERENCE = (
    rf"moved: {SAMPLES}: not the samples that were captured, so there is no reference \({{}}\); build again\n$"
)
UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a graph": (lambda root: os.truncate(root / GRAPH, 999), rf"{GRAPH}: missing or damaged \(.*\); build again"),
    "no graph": (
        lambda root: (root / GRAPH).unlink(),
        rf"{GRAPH}: missing or damaged \(.*No such file.*\); build again",
    ),
    "JSON without end": (
        lambda root: (root / GRAPH).write_text("[" * 100_000),
        rf"{GRAPH}: missing or damaged \(maximum recursion depth.*\); build again\n$",
    ),
    "another JSON": (lambda root: (root / GRAPH).write_text("{}"), rf"{GRAPH}: missing or damaged \(.*\); build again"),
    "no archive": (
        lambda root: (root / CONSTANTS).write_bytes(b"PK\x03\x04" + bytes(99)),
        rf"{CONSTANTS}: missing or damaged \(.*\); build again",
    ),
    "no samples": (_samples(lambda name, array: {}), NO_REFERENCE.format(".*")),
    "samples of another shape": (
        _samples(lambda name, array: {name: array[:, 1:]}),
        NO_REFERENCE.format("the reference at b1s8: the model itself fails with these inputs"),
    ),
    "samples of no vocabulary": (
        _samples(lambda name, array: {name: array + 10**6}),
        NO_REFERENCE.format("index out of range in self"),
    ),
}


@pytest.mark.fast("half a graph", "no graph", "JSON without end", "another JSON", "no archive", "no samples")
@pytest.mark.parametrize("name", UNREADABLE)
def test_without_a_reference_there_is_one_sentence_and_no_verdict(name: str, copied: Path) -> None:
    change, message = UNREADABLE[name]
    change(copied)
    found = invoke("validate", copied)
    refused(found, message)
    assert found.stdout == ""


def test_what_can_be_read_is_judged(copied: Path) -> None:
    """Other samples of the same shapes are reported with the name of their file."""
    _samples(lambda name, array: {name: array[:, ::-1]})(copied)
    found = invoke("validate", copied)
    assert found.exit_code == 4, found.output
    assert f"  - {SAMPLES}: not the samples that were captured\n" in found.stdout
    assert found.stdout.endswith("FAIL\n")


@pytest.mark.slow
def test_other_bugs_are_not_blamed_on_the_folder(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("mod_export.pipeline.validate._candidates", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        mod_export.pipeline.rerun.validate_folder(copied, None, ())
