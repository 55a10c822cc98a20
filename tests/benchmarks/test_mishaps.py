"""The tool that kills commands: it passes what is safe, and finds a command that writes in place."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.kills import run
from benchmarks.kills.works import WORKS


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_a_command_survives(name: str) -> None:
    found = CliRunner().invoke(run.main, ["--kills", "3", name])
    assert found.exit_code == 0, found.output
    assert f"{name:9} 3 kills of a command of " in found.output
    assert ": nothing damaged; " in found.output


@pytest.mark.slow
@pytest.mark.parametrize(("careless", "message"), [(True, "/killed: "), (False, "its result differs: ")])
def test_a_command_that_does_not_is_found(
    careless: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that writes in place, and one that does not finish what it began."""

    def convert() -> None:
        source, out = map(Path, sys.argv[-2:])
        if out.exists() and not careless:
            return
        out.mkdir(exist_ok=True)
        for path in sorted(source.iterdir(), reverse=True):
            if careless:
                with (out / path.name).open("wb") as file:
                    for number in range(10):
                        size = path.stat().st_size // 10 + 1
                        file.write(path.read_bytes()[number * size : (number + 1) * size])
                        file.flush()
                        time.sleep(0.02)
            else:
                time.sleep(0.2)
                shutil.copyfile(path, out / path.name)

    monkeypatch.setattr(run, "mod_export_command", convert)
    if not careless:
        monkeypatch.setattr(WORKS["convert"], "check", lambda *_: None)
    found = CliRunner().invoke(run.main, ["--kills", "20", "convert"])
    assert found.exit_code == 1, found.output
    assert "convert   FAIL: " in found.output
    assert message in found.output
