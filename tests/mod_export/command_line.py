"""Helpers that run the command line and check its results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from mod_export.cli import cli
from mod_models.checkpoint import Checkpoint

FEW_SAMPLES = """
[latency]
samples = 5
max_samples = 8
warmup = 1
bootstrap = 100
min_speedup = 0.0
"""
FAST_TOML = f"""
buckets = [[1, 16]]
targets = ["ort-cpu"]
{FEW_SAMPLES}
[generation]
build = "never"
"""


def invoke(*arguments: object) -> Result:
    """Runs the command in this process, where PyTorch is already loaded."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def refused(found: Result, message: str) -> None:
    """Checks for one clear message on stderr, given as a regular expression, and no other output."""
    assert (found.exit_code, found.stdout) == (2, ""), found.output
    assert re.search(message, found.stderr), found.stderr
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr


def command(*arguments: object, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, after `code`."""
    script = f"import sys\n{code}\nfrom mod_export.cli import main\nmain()"
    listed = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
    return subprocess.run(listed, capture_output=True, text=True, check=False, **options)


def commands(requests: Sequence[Sequence[object]], code: str) -> list[tuple[int, str, str]]:
    """Runs several commands in one new process, after `code`; returns exit code, stdout and stderr of each."""
    script = f"""
import json, sys
{code}
from click.testing import CliRunner
from mod_export.cli import cli
found = [CliRunner().invoke(cli, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in found]))
"""
    listed = json.dumps([[str(argument) for argument in arguments] for arguments in requests])
    done = subprocess.run([sys.executable, "-c", script, listed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [(exit_code, stdout, stderr) for exit_code, stdout, stderr in json.loads(done.stdout)]


def uncovered() -> dict[str, str]:
    """Environment of a process that must not measure its coverage. A process that may not write large files would leave
    a damaged coverage file, and combining all files would fail.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}


def contents(folder: Path) -> dict[str, bytes | None]:
    """Contents of a folder by path, except for the lock file of a build."""
    found = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def raw_checkpoint(path: Path, checkpoint: Checkpoint, **header: Any) -> Path:
    """Writes a model.pt with a header that `save_checkpoint` would not write."""
    spec = checkpoint.spec.to_dict() | header.pop("spec", {})
    data = {"format_version": 1, "architecture": "mod_transformer", "spec": spec, "weights": dict(checkpoint.weights)}
    torch.save(data | header, path)
    return path


class Payload:
    """A pickle that runs code: it makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def toml_file(folder: Path, text: str) -> Path:
    (folder / "c.toml").write_text(text, encoding="utf-8")
    return folder / "c.toml"
