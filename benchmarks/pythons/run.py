"""Runs the tests in every Python that is found here, each in an environment of its own with mod-export's wheel.

    make pythons                                        # takes minutes for each Python
    .venv/bin/python -m benchmarks.pythons.run 3.13     # one of them

Where PyTorch can be installed without CUDA, the fast tests run (`make test`). PyPI's PyTorch for Linux brings gigabytes
of CUDA along, so this needs an index with the CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or a
folder of wheels in PIP_FIND_LINKS. Elsewhere a Python is tested as that of a server: the tests of tests/deployment, and
engines of ONNX Runtime and OpenVINO that this environment builds and that Python runs, with the same results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

import mod_export
from benchmarks.floors.environments import (
    CONFIG,
    IDS,
    ROOT,
    alone_with_pytest,
    build,
    checked,
    environment_with,
    run,
    tiny_checkpoint,
    wheel_of,
)

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVED_WITH = "serve,ort,generate,structured,openvino"
TARGETS = ("ort-cpu", "openvino")
TOLERANCE = 1e-4
CONSTRAINTS = ROOT / "constraints.txt"
RUN = """
import sys, numpy as np, mod_export
folder, target, out, ids = sys.argv[1], sys.argv[2], sys.argv[3], [int(one) for one in sys.argv[4].split(",")]
with mod_export.load(folder, target=target) as deployment:
    np.save(out, deployment.run(np.array([ids], dtype=np.int64)))
with mod_export.load_generator(folder, target=target) as generator:
    print(*generator.generate([ids], max_new_tokens=4)[0].ids)
"""


def interpreters() -> dict[str, Path]:
    """Returns the newest Python of each minor version: on PATH, of pyenv, or of uv."""
    found = {}
    for minor in PYTHONS:
        candidates = [
            *(path for folder in _folders() for path in folder.glob(f"*{minor}.*/bin/python{minor}")),
            *(Path(path) for path in (shutil.which(f"python{minor}"),) if path),
        ]
        works = [path for path in candidates if run(path, "-c", "import venv, ensurepip", cwd=ROOT).returncode == 0]
        if works:
            found[minor] = max(works, key=_patch)
    return found


def _folders() -> Iterator[Path]:
    yield Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local" / "share" / "uv" / "python"))


def _patch(path: Path) -> tuple[int, ...]:
    shown = run(path, "-c", "import sys; print(*sys.version_info[:3])", cwd=ROOT).stdout
    return tuple(map(int, shown.split()))


def why_no_torch(python: Path, folder: Path) -> str:
    """Returns why PyTorch is not installed for this Python; empty if it can be, without CUDA."""
    checked(python, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "python", "-m", "pip")
    report = folder / "report.json"
    # A dry run downloads only metadata, if the index has it apart from the wheel.
    options = ("--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", "torch", "--report", report)
    done = run(*pip, "install", *options, "--constraint", CONSTRAINTS, "torch", cwd=folder)
    if done.returncode:
        return next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
    (entry,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    needed = [Requirement(text) for text in entry["metadata"].get("requires_dist", ())]
    here = [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    cuda = [name for name in here if name.startswith(("nvidia", "cuda"))]
    version = entry["metadata"]["version"]
    return f"the torch {version} that pip finds needs {', '.join(cuda)}" if cuda else ""


def runs_elsewhere(python: Path, built: Path, out: Path) -> str:
    """Runs the engines of a folder in another Python. Returns the result in words.

    Raises:
        RuntimeError: a target failed there, or computed something else.
    """
    ids = ",".join(map(str, IDS))
    for target in TARGETS:
        file = out / f"{target}.npy"
        written = checked(python, "-c", RUN, built, target, file, ids, cwd=out).split()
        with mod_export.load(built, target=target) as deployment:
            error = float(np.abs(np.load(file) - deployment.run(np.array([IDS], dtype=np.int64))).max())
        with mod_export.load_generator(built, target=target) as generator:
            here = generator.generate([IDS], max_new_tokens=4)[0].ids
        if not error <= TOLERANCE or written != [str(token) for token in here]:
            raise RuntimeError(f"{target}: logits differ by {error:.1e}, or texts: {written} and {here}")
    return f"engines of {' and '.join(TARGETS)} run with the same results"


def tested(python: Path, folder: Path, wheel: Path, built: Path) -> str:
    """Tests one Python and returns the result in words.

    Raises:
        RuntimeError: something failed.
    """
    folder.mkdir()
    reason = why_no_torch(python, folder / "probe")
    extras, pins = (SERVED_WITH, ["pytest"]) if reason else (f"build,{SERVED_WITH},dev", [])
    inside = environment_with(folder / "venv", wheel, extras, pins, CONSTRAINTS, python)
    if not reason:
        options = ("-q", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "worksteal", "-m", "not slow")
        return f"fast tests: {_last(checked(inside, '-m', 'pytest', *options, cwd=ROOT))}"
    output = checked(inside, *alone_with_pytest(ROOT / "tests" / "deployment", folder), cwd=folder)
    return f"as a server: {_last(output)}; {runs_elsewhere(inside, built, folder)} (no fast tests: {reason})"


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\d+ passed", line)]
    return lines[-1].strip("= ") if lines else "no summary"


def main(names: list[str]) -> int:
    """Tests the named Pythons, by default all. Returns the number of those that fail, or are named and absent."""
    found, failed = interpreters(), 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        wheel = wheel_of(root / "wheel")
        checkpoint, config = tiny_checkpoint(root / "model")
        config.write_text(CONFIG.replace('["ort-cpu"]', json.dumps(TARGETS)), encoding="utf-8")
        build(Path(sys.executable), checkpoint, config, root / "built")
        for name in names or PYTHONS:
            begin = time.perf_counter()
            if name == OWN and not names:
                print(f"{name:<8} this environment's own: make test", flush=True)
                continue
            if name not in found:
                failed += bool(names)
                print(f"{name:<8} not found: on PATH, of pyenv, or of uv", flush=True)
                continue
            try:
                result = tested(found[name], root / name, wheel, root / "built")
            except RuntimeError as failure:
                failed += 1
                result = f"FAILS: {failure}"
            version = ".".join(map(str, _patch(found[name])))
            print(f"{version:<8} {result}  ({time.perf_counter() - begin:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
