"""Virtual environments with mod-export installed from its wheel, and the tiny build folder that is served in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import mod_export
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import ModelSpec, RoutingSpec

ROOT = Path(__file__).parents[2]
SOURCES = ("mod_export", "models", "export_configs", "pyproject.toml", "README.md", "LICENSE")
IDS = list(b"def main():")
TIMEOUT_S = 900
SPEC = ModelSpec(
    vocab_size=256, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, max_positions=64,
    routing=RoutingSpec(selection="threshold"),
)  # fmt: skip
CONFIG = """
buckets = [[1, 32]]
targets = ["ort-cpu"]
[latency]
samples = 5
max_samples = 8
warmup = 1
bootstrap = 100
min_speedup = 0.0
[generation]
window = 32
batches = [1]
"""
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
SERVE = """
import sys, numpy as np, mod_export
folder, out, ids = sys.argv[1], sys.argv[2], [int(one) for one in sys.argv[3].split(",")]
with mod_export.load(folder) as deployment:
    np.save(out, deployment.run(np.array([ids], dtype=np.int64)))
with mod_export.load_generator(folder) as generator:
    print(generator.generate([ids], max_new_tokens=4)[0].ids)
"""


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder `cwd`, so that it imports nothing from the working tree."""
    listed = [str(argument) for argument in command]
    return subprocess.run(listed, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def checked(*command: object, cwd: Path) -> str:
    """Like `run`, but returns the output, and raises RuntimeError if the command fails."""
    done = run(*command, cwd=cwd)
    if done.returncode:
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"  # pytest tells its failures on stdout.
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{said}")
    return done.stdout


def wheel_of(folder: Path) -> Path:
    """Builds mod-export's wheel from a copy of its sources, so that nothing is left in the working tree."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, sources)
    checked(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sources, cwd=folder)
    return next(folder.glob("mod_export-*.whl"))


def environment_with(
    folder: Path, wheel: Path, extras: str, pins: Sequence[str], constraints: Path | None, base: Path | None = None
) -> Path:
    """Makes an environment with mod-export's wheel, these extras (separated by commas) and these requirements.
    `constraints` pins the versions of everything else. `base` is the Python to use, by default the one that runs this.
    Returns the environment's Python.
    """
    checked(base or sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    options = [] if constraints is None else ["--constraint", constraints]
    wanted = f"{wheel}[{extras}]" if extras else wheel
    checked(python, "-m", "pip", "install", "-q", *options, wanted, *pins, cwd=folder)
    return python


def environment_over(base: Path, folder: Path, pins: Sequence[str], constraints: Path | None) -> Path:
    """Makes an environment with these requirements in front of all packages of another environment, given by its
    Python. `constraints` pins the versions of what the requirements need. Returns the environment's Python.
    """
    checked(base, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    own, below = (Path(checked(path, "-c", SITE, cwd=folder).strip()) for path in (python, base))
    # Python appends the paths in such a file to its own, so packages of this environment are found first.
    (own / "below.pth").write_text(f"{below}\n", encoding="utf-8")
    options = [] if constraints is None else ["--constraint", constraints]
    checked(python, "-m", "pip", "install", "-q", *options, *pins, cwd=folder)
    return python


def alone_with_pytest(tests: Path, folder: Path) -> tuple[object, ...]:
    """Returns arguments of a Python: they run tests away from the sources, so that the wheel is what is imported."""
    options = ("-q", "-p", "no:cacheprovider", "-o", "pythonpath=", "-c", ROOT / "pyproject.toml")
    return ("-m", "pytest", *options, "--rootdir", folder, "--confcutdir", tests, tests)


def tiny_build(folder: Path) -> Path:
    """A finished build folder of a tiny model that also writes text, made by the tests' own environment."""
    checkpoint, config = tiny_checkpoint(folder)
    build(Path(sys.executable), checkpoint, config, folder / "build")
    return folder / "build"


def tiny_checkpoint(folder: Path) -> tuple[Path, Path]:
    """Writes the model with initial weights and its build configuration, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "tiny.pt", random_checkpoint(SPEC, 0))
    (folder / "tiny.toml").write_text(CONFIG, encoding="utf-8")
    return folder / "tiny.pt", folder / "tiny.toml"


def build(python: Path, checkpoint: Path, config: Path, out: Path) -> None:
    """Builds `checkpoint` into `out` with the mod-export of an environment."""
    checked(python, "-m", "mod_export", "build", checkpoint, "-c", config, "-o", out, "-q", cwd=checkpoint.parent)


def logits_here(folder: Path) -> np.ndarray:
    """Returns the logits (1, S, V) that the tests' own environment computes."""
    with mod_export.load(folder) as deployment:
        return deployment.run(np.array([IDS], dtype=np.int64))


def serve(python: Path, folder: Path, out: Path) -> np.ndarray:
    """Returns the logits (1, S, V) that an environment computes. It must also write four tokens and show the report."""
    file = out / "logits.npy"
    written = checked(python, "-c", SERVE, folder, file, ",".join(map(str, IDS)), cwd=out)
    if len(written.split(",")) != 4:
        raise RuntimeError(f"expected four token ids, got {written!r}")
    checked(python, "-m", "mod_export", "report", folder, cwd=out)
    checked(python, "-m", "mod_export", "targets", cwd=out)
    logits: np.ndarray = np.load(file)
    return logits
