"""Build folders of machines that these tests do not have, and the command under test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from command_line import invoke

from mod_export.folder.files import entry_of
from mod_export.folder.manifest import read_manifest
from mod_export.folder.workspace import amend
from mod_export.types import Bucket

Command = Callable[..., Result]


@pytest.fixture(scope="session")
def write() -> Command:
    """Runs `mod-export triton` in this process."""

    def run(*arguments: object) -> Result:
        return invoke("triton", *arguments)

    return run


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Path at which a repository can be written."""
    return tmp_path / "repository"


PlanFolder = Callable[..., Path]


@pytest.fixture
def with_plans(written: Path, tmp_path: Path) -> PlanFolder:
    """Makes a copy of `written` that lists plans beside its engines. The files hold no plans, because a GPU is needed
    to build one.
    """

    def make(*plans: tuple[str, str, str, str], target: str = "tensorrt") -> Path:
        """Each of `plans` has a role, bucket, dtype and architecture."""
        root = Path(shutil.copytree(written, tmp_path / "plans", ignore=shutil.ignore_patterns(".partial-*")))
        data = read_manifest(root)
        engines, files = list(data["engines"]), dict(data["files"])
        for role, bucket, dtype, arch in plans:
            stem = bucket if role == "forward" else f"{role}-{bucket}"
            path = f"engines/{target}/mod-{stem}-{dtype}-{arch}.engine"
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(path.encode())
            shape = Bucket.named(bucket)
            engines.append(
                {
                    "target": target,
                    "model": "mod",
                    "bucket": {"batch": shape.batch, "seq": shape.seq},
                    "dtype": dtype,
                    "path": path,
                    "weights": None,
                    "arch": arch,
                    "role": role,
                }
            )
            files[path] = entry_of(root / path).model_dump()
        amend(root, lambda: ({"engines": engines, "files": files}, {}))
        return root

    return make
