"""Installs the lowest version of every declared range, each in an environment of its own, and builds, serves or tests.

    make floors            # by hand, after a change of pyproject.toml's ranges; what it finds goes into docs/LOG.md
    .venv/bin/python -m benchmarks.floors.run onnxruntime onnx      # some of them

Everything else has the versions of constraints.txt. Packages of the [build] extra build the tiny model. Packages that
TESTS names pass those tests. Those of [serve] pass the tests of tests/deployment, where a server answers. All others
serve the model from a folder that was built with the pinned versions, and must give the same logits.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.floors.environments import (
    ROOT,
    alone_with_pytest,
    build,
    checked,
    environment_over,
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
    "", "build", "ort", "ort-gpu", "openvino", "generate", "structured", "convert", "train", "sign", "serve", "traces",
    "ray", "tensorrt", "tensorrt-rtx",
)  # fmt: skip
TESTED_WITH = (
    "build",
    "dev",
    "ort",
    "openvino",
    "structured",
    "convert",
    "train",
    "sign",
    "serve",
    "traces",
    "ray-serve",
)
"""Extras of the environment in which tests run."""
DEPLOYMENT = ROOT / "tests" / "deployment"
LEFT_OUT = {
    "torch": "no CPU build of the floor is on PyPI, and that for CUDA takes 3 GB",
    "onnxruntime-gpu": "the same library as onnxruntime; the floor is the same",
    "nvidia-cuda-runtime": "TensorRT needs a GPU to run",
    "polygraphy": "TensorRT needs a GPU to run",
    "tensorrt": "needs a GPU to build and to run",
    "tensorrt-rtx": "needs a GPU to run",
}
TOLERANCE = 1e-4
TOKENIZER_FILES = "tests/mod_export/model/test_tokenizer_files.py"
SIGNATURE = "tests/mod_export/folder/test_signature.py"
TRACES = "tests/mod_export/serve/test_traces.py"
OPENTELEMETRY = {"opentelemetry-api", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"}
TOGETHER = (OPENTELEMETRY, {"protobuf", "sentencepiece"})
"""Groups of packages whose lowest releases work only with each other."""
TESTS = {
    "gguf": ("tests/models/test_convert_gguf.py", "tests/models/test_convert_gguf_tokenizer.py"),
    "huggingface_hub": ("tests/mod_export/model/test_hub.py",),
    "llguidance": ("tests/mod_export/runtime/test_grammar.py",),
    "openvino": ("tests/mod_export/engines/test_openvino.py",),
    **dict.fromkeys(("protobuf", "sentencepiece", "tiktoken", "transformers"), (TOKENIZER_FILES,)),
    "pyarrow": ("tests/models/test_documents.py",),
    "tensorboard": ("tests/models/test_train_log.py",),
    **dict.fromkeys(("model-signing", "pyopenssl"), (SIGNATURE,)),
    **dict.fromkeys(OPENTELEMETRY, (TRACES,)),
    "ray": ("tests/mod_export/sweep/test_cluster.py",),
}
"""Package -> files of tests that use it."""


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


def constraints_without(names: Container[str], folder: Path) -> Path:
    """Writes the pinned versions of all packages but these to a file, and returns its path."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    kept = [line for line in lines.splitlines() if line.partition("==")[0] not in names]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def check(
    name: str, floors: Mapping[str, str], extra: str, wheel: Path, built: Path, tested: Path, folder: Path
) -> str:
    """Returns the result for one floor: what worked, such as `builds and serves`, or a line that says why it fails.

    Args:
        name: the package.
        floors: the version of the package, and of those that go with it.
        extra: the extra of mod-export that asks for it.
        wheel: mod-export's wheel.
        built: a finished build folder of the pinned versions.
        tested: the Python of an environment in which all tests can run with the pinned versions.
        folder: an empty folder.
    """
    folder.mkdir()
    pins, constraints = [f"{item}=={version}" for item, version in floors.items()], constraints_without(floors, folder)
    builds = extra == "build"
    try:
        if name in TESTS or builds:
            python = _with_constraints(partial(environment_over, tested, folder / "venv", pins), constraints)
        else:
            extras = ",".join((*SERVED_WITH, *("serve",) * (extra == "serve")))
            make = partial(environment_with, folder / "venv", wheel, extras, [*pins, "pytest"])
            python = _with_constraints(make, constraints)
        if name in TESTS:
            # The lowest release may use what newer ones of other packages warn about.
            options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", "-m", "not slow")
            checked(python, "-m", "pytest", *options, *TESTS[name], cwd=ROOT)
            return "passes its tests"
        if extra == "serve":
            checked(python, *alone_with_pytest(DEPLOYMENT, folder), cwd=folder)
            return "passes the tests of a server"
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


def _with_constraints(make: Callable[[Path | None], Path], constraints: Path) -> Path:
    """Makes an environment with the pinned versions of all other packages, or with any versions of them if a pinned one
    does not go with the floor.
    """
    try:
        return make(constraints)
    except RuntimeError as failure:
        if "ResolutionImpossible" not in str(failure):
            raise
        return make(None)


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
        tested = environment_with(root / "tested", wheel, ",".join(TESTED_WITH), [], ROOT / "constraints.txt")
        for name in names or ranges:
            extra, specifier = ranges[name]
            begin = time.perf_counter()
            floor = lowest(name, specifier)
            if name in LEFT_OUT:
                result = f"left out: {LEFT_OUT[name]}"
            elif floor is None:
                result = "FAILS: PyPI has no release in this range for this machine"
            else:
                group = next((names for names in TOGETHER if name in names), {name})
                floors = {
                    item: floor if item == name else lowest(item, ranges[item][1]) or "" for item in sorted(group)
                }
                result = check(name, floors, extra, wheel, built, tested, root / name)
            failed += result.startswith("FAILS")
            about = f"{name:<20} {specifier:<10} {floor or '-':<10}"
            print(f"{about} {result}  ({time.perf_counter() - begin:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
