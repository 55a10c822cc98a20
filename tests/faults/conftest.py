"""Sound folders to plant faults into, built once for all workers."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.base_folder import FOLDERS, FolderName
from benchmarks.faults.compiled_faults import write_packages


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder by name once: the first worker makes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "faults"
    shared.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.done").exists():
                make(shared / name)
                (shared / f"{name}.done").touch()
        return shared / name

    return made


@pytest.fixture(scope="session")
def sound(once: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[FolderName], Path]:
    """Returns a sound folder by its name in FOLDERS."""
    return lambda name: once(name, FOLDERS[name]) / "build"


@pytest.fixture(scope="session")
def packages(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Packages of faulty models."""
    return once("packages", write_packages)
