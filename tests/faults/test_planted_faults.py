"""`validate` finds every planted fault in the right place, and finds none in sound folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.base_folder import FOLDERS, FolderName
from benchmarks.faults.foreign_faults import HIDDEN, TIES
from benchmarks.faults.planting import FAULTS, outcome_of
from benchmarks.faults.random_specs import foreign_of_ties, random_build, random_build_of_any_kind, random_foreign
from benchmarks.faults.rates import build_clean
from mod_export.pipeline.rerun import validate_folder
from mod_export.rows.correctness import StructureRow
from mod_models.declarations import CANDIDATES, CHOICES, KEYS_VALUES, RESULTS, SELECTIONS

FEW_CLEAN, FEW_FOREIGN = (0, 1, 2, 3), (0, 1, 2)
Sound = Callable[[FolderName], Path]
LUCKY = 1004
"""A model whose reference happens to compute the exact score of a token with a gate near zero."""
ONNX_FAULTS = [name for name, fault in FAULTS.items() if "compiled" not in fault.folder]
TELLING = {
    "masked: gate 1 % too large", "masked: the smallest scores are taken", HIDDEN,
    "masked: one element of the second output wrong by 0.001", "masked: buffer that is not saved, one element changed",
}  # fmt: skip
"""Faults that `make test` plants, all into the folder that is built fastest."""
EPSILON = "masked: captured program with another epsilon"
"""A fault after which the sound folder must still pass: the reference is rebuilt from the program that it changes."""
COMPILED_FAULTS = [name for name, fault in FAULTS.items() if "compiled" in fault.folder]
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_command_of_the_makefile_starts() -> None:
    """The command sets its own path to the modules that the tests share."""
    recipe = re.search(r"^faults: install\n\t(.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    line = recipe[1].replace("$(BIN)/python", sys.executable) + " --only nothing --clean 0"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=ROOT, env=own, check=False)
    assert found.returncode == 0, found.stderr
    assert "planted faults: 0, caught: 0" in found.stdout


def test_there_are_as_many_as_promised() -> None:
    assert len(FAULTS) >= 40
    assert set(ONNX_FAULTS) >= TELLING


@pytest.mark.drawn
@pytest.mark.fast(*TELLING)
@pytest.mark.parametrize("name", [name for name in ONNX_FAULTS if name != EPSILON])
def test_a_fault_in_a_graph_or_a_file(name: str, sound: Sound, tmp_path: Path) -> None:
    found = outcome_of(name, sound(FAULTS[name].folder), Path(), tmp_path)
    assert found.caught, (found.place, found.reasons)
    if name == HIDDEN:
        # Hidden states are not logits, whatever users call them.
        assert any("hidden: max abs error" in reason for reason in found.reasons)
        assert not any("next token" in reason for reason in found.reasons)
    if name == TIES:
        # torch.topk leaves open which of equal tokens it takes, so the fault shows only in the file.
        assert not found.by_running


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", COMPILED_FAULTS)
def test_a_fault_in_compiled_code(name: str, sound: Sound, packages: Path, tmp_path: Path) -> None:
    found = outcome_of(name, sound(FAULTS[name].folder), packages, tmp_path)
    assert found.caught, (found.place, found.reasons)


@pytest.mark.fast("two outputs")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_sound_folder_passes(name: FolderName, sound: Sound, tmp_path: Path) -> None:
    if name == FAULTS[EPSILON].folder:
        # Two folders of one process then have manifests that say the same about two different programs.
        assert outcome_of(EPSILON, sound(name), Path(), tmp_path).caught
    rerun = validate_folder(sound(name), None, ())
    assert rerun.verdict.status == "pass", rerun.verdict.reasons
    assert all(row.passed for row in rerun.rows(StructureRow))


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("seed", [*FEW_CLEAN, LUCKY])
def test_sound_builds_of_random_models_pass(seed: int, tmp_path: Path) -> None:
    """`make faults` builds 200 of these models."""
    reasons, ratio = build_clean(tmp_path, random_build, seed)
    assert reasons == ()
    assert ratio > 0


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("seed", FEW_FOREIGN)
def test_sound_builds_of_modules_of_users_pass(seed: int, tmp_path: Path) -> None:
    reasons, ratio = build_clean(tmp_path, random_foreign, seed)
    assert reasons == ()
    assert ratio > 0


@pytest.mark.slow
def test_a_module_whose_scores_are_all_equal_passes(tmp_path: Path) -> None:
    reasons, _ = build_clean(tmp_path, foreign_of_ties, 0)
    assert reasons == ()


def test_random_models_differ() -> None:
    assert len({repr(random_build(seed).checkpoint.spec) for seed in range(20)}) == 20
    kinds = [random_build_of_any_kind(seed).checkpoint.spec for seed in range(40)]
    assert {spec.routing.selection for spec in kinds if spec.routing} == set(SELECTIONS)
    assert {spec.experts.choice for spec in kinds if spec.experts} == set(CHOICES)
    assert {spec.routing.skipped_keys_values for spec in kinds if spec.routing} == set(KEYS_VALUES)
    assert {spec.routing.skipped_result for spec in kinds if spec.routing} == set(RESULTS)
    assert {spec.routing.candidates for spec in kinds if spec.routing} == set(CANDIDATES)
    assert {spec.routing.blocks_per_router for spec in kinds if spec.routing} == {1, 2}
    assert len({repr(random_foreign(seed).module) for seed in range(40)}) > 15
