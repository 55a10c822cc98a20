"""Installs the lowest version of every declared range, each in an environment of its own, and builds or serves there.

    make floors            # by hand, after a change of pyproject.toml's ranges; its table goes into docs/LOG.md
    .venv/bin/python -m benchmarks.floors.run onnxruntime onnx      # some of them

Everything else has the versions of constraints.txt. Packages of the [build] extra build the tiny model; those of
[convert] and [openvino] pass the tests that use them; all others serve the model from a folder that was built with the
pinned versions, and must give the same logits.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tomllib
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.floors.environments import (
    ROOT,
    build,
    checked,
    environment_with,
    logits_here,
    run,
    serve,
    tiny_build,
    tiny_checkpoint,
    wheel_of,
)

SERVED_WITH = ("ort", "generate")
EXTRAS = (
    "", "build", "ort", "ort-gpu", "openvino", "generate", "structured", "convert", "tensorrt", "tensorrt-rtx",
)  # fmt: skip
LEFT_OUT = {
    "torch": "no CPU build of the floor is on PyPI, and that for CUDA takes 3 GB",
    "onnxruntime-gpu": "the same library as onnxruntime; the floor is the same",
    "nvidia-cuda-runtime": "TensorRT needs a GPU to run",
    "polygraphy": "TensorRT needs a GPU to run",
    "tensorrt": "needs a GPU to build and to run",
    "tensorrt-rtx": "needs a GPU to run",
}
TOLERANCE = 1e-4
TESTS = {
    "gguf": ("tests/models/test_convert_gguf.py", "tests/models/test_convert_gguf_tokenizer.py"),
    "huggingface_hub": ("tests/mod_export/model/test_hub.py",),
    "llguidance": ("tests/mod_export/runtime/test_grammar.py",),
    "openvino": ("tests/mod_export/engines/test_openvino.py",),
}
"""Test files for each package of [convert], [openvino] and [structured]."""


def declared() -> dict[str, tuple[str, str]]:
    """Package -> (the extra that asks for it, empty for none; the range)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    ranges: dict[str, tuple[str, str]] = {}
    for extra in EXTRAS:
        for requirement in map(Requirement, groups[extra]):
            ranges.setdefault(requirement.name, (extra, str(requirement.specifier)))
    return ranges


def lowest(name: str, specifier: str) -> str | None:
    """Returns the lowest release of a range that can be installed here, or None if there is none."""
    done = run(sys.executable, "-m", "pip", "index", "versions", name, cwd=ROOT)
    listed = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), "")
    versions = [Version(text.strip()) for text in listed.partition(":")[2].split(",") if text.strip()]
    inside = [version for version in versions if version in SpecifierSet(specifier)]
    return str(min(inside)) if inside else None


def constraints_without(name: str, folder: Path) -> Path:
    """Writes the pinned versions of all packages but `name` to a file, and returns its path."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    kept = [line for line in lines.splitlines() if line.partition("==")[0] != name]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def check(name: str, floor: str, extra: str, wheel: Path, built: Path, folder: Path) -> str:
    """Returns the result for one floor: `serves`, `builds and serves`, `passes its tests`, or a line why it fails."""
    folder.mkdir()
    constraints = constraints_without(name, folder)
    builds = extra == "build"
    extras = ",".join((*("build",) * builds, *("build", extra, "dev") * (name in TESTS), *SERVED_WITH))
    try:
        python = environment_with(folder / "venv", wheel, extras, [f"{name}=={floor}"], constraints)
        if name in TESTS:
            checked(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[name], cwd=ROOT)
            return "passes its tests"
        if builds:
            checkpoint, config = tiny_checkpoint(folder / "model")
            built = folder / "built"
            build(python, checkpoint, config, built)
        error = float(np.abs(serve(python, built, folder) - logits_here(built)).max())
    except RuntimeError as failure:
        return "FAILS: " + [line for line in str(failure).splitlines() if line.strip()][-1]
    if not error <= TOLERANCE:
        return f"FAILS: logits differ by {error:.1e}, expected at most {TOLERANCE:.0e}"
    return "builds and serves" if builds else "serves"


def main(names: list[str]) -> int:
    """Checks the named packages, by default all. Returns the number of floors that fail; 1 if a name is unknown."""
    failed = 0
    ranges = declared()
    unknown = [name for name in names if name not in ranges]
    if unknown:
        print(f"no range is declared for {', '.join(unknown)}; declared: {', '.join(ranges)}")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        wheel, built = wheel_of(root / "wheel"), tiny_build(root / "model")
        for name in names or ranges:
            extra, specifier = ranges[name]
            begin = time.perf_counter()
            floor = lowest(name, specifier)
            if name in LEFT_OUT:
                result = f"left out: {LEFT_OUT[name]}"
            elif floor is None:
                result = "FAILS: PyPI has no release in this range for this machine"
            else:
                result = check(name, floor, extra, wheel, built, root / name)
            failed += result.startswith("FAILS")
            about = f"{name:<20} {specifier:<10} {floor or '-':<10}"
            print(f"{about} {result}  ({time.perf_counter() - begin:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
