"""The tool that lets mishaps happen to commands: it passes what is safe, and finds commands that are careless."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.mishaps import run
from benchmarks.mishaps.mishaps import MISHAPS
from benchmarks.mishaps.shim import compiled_shim
from benchmarks.mishaps.works import WORKS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", WORKS)
def test_a_command_survives(name: str) -> None:
    """Mishaps of every kind, in a namespace and with the library of its own."""
    command = [sys.executable, "-m", "benchmarks.mishaps.run", "--count", "2", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"this system has no namespaces for users: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [kind for kind, mishap in MISHAPS.items() if WORKS[name].writes or not mishap.of_writers]
    found = [line.split()[:3] for line in done.stdout.splitlines()]
    assert found == [[name, kind, "2"] for kind in kinds], done.stdout
    assert done.stdout.count(": nothing damaged; ") == len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize(("careless", "message"), [(True, "/out: "), (False, "its result differs: ")])
def test_a_command_that_a_kill_damages_is_found(
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
    found = CliRunner().invoke(run.main, ["--count", "20", "--kind", "kill", "convert"])
    assert found.exit_code == 1, found.output
    assert "convert   kill    FAIL: after killed after " in found.output
    assert message in found.output


CARELESS = """
import os, shutil, sys, time
from pathlib import Path
from benchmarks.mishaps import run
def convert():
    source, out = map(Path, sys.argv[-2:])
    {body}
run.mod_export_command = convert
run.main(["--count", "4", "--kind", "{kind}", "convert"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "body", "message"), [
    ("rename", "shutil.copytree(source, out.with_name('out-new')); os.replace(out.with_name('out-new'), out)",
     "and a traceback"),
    ("rename", "shutil.copytree(source, out, dirs_exist_ok=True)\n"
     "    try: os.replace(out / 'generation_config.json', out / 'g.json')\n    except OSError: pass",
     "its result differs: "),
    ("clock", "shutil.copytree(source, out); (out / 'time.json').write_text(str(time.localtime().tm_year))",
     "its result differs: time.json"),
])  # fmt: skip
def test_a_command_that_is_careless_is_found(kind: str, body: str, message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(compiled_shim(tmp_path)), run.ALREADY: "1"}
    code = CARELESS.format(kind=kind, body=body)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"convert   {kind:7} FAIL: after " in done.stdout
    assert message in done.stdout
