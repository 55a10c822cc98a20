"""Compiles everything that `make gpu` runs, as far as compilers go without a GPU: what `make gpu-code` runs.

    python -m benchmarks.gpu_code.run [--results DIR] [--docs DIR] [--only NAME] [--again]

* `inductor-cuda`: the kernels of every engine become machine code of four architectures (`triton_kernels.py`), and
  Triton's interpreter runs those of tiny engines (`interpreter.py`).
* `ort-cuda`: ONNX Runtime's CUDA provider takes the engines (`ort_nodes.py`).
* `tensorrt-rtx`: NVIDIA's compiler builds plans for every architecture with the float32 products that routers need.

Nothing of it runs on a GPU, so it shows no speed. Each piece of work has its own process; finished ones are not
repeated. Writes gpu-code.json, and gpu-code.md from it. The exit code is 1 if a piece of work failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import CONFIG
from benchmarks.gpu.plan import SPEC as M
from benchmarks.gpu_code.cuda_runtime import make_libraries
from benchmarks.gpu_code.render import render
from benchmarks.gpu_code.torch_device import GPUS
from mod_export.rows.report import report_from_json
from mod_models.checkpoint import random_checkpoint, save_checkpoint
from mod_models.spec import EveryNth, ModelSpec, RoutingSpec

NEEDED = ("torch", "triton", "onnxruntime-gpu", "tensorrt_rtx")
LIMIT = 1800
"""Seconds for a process."""
RTX = ("sm80", "sm86", "sm89", "sm120", "sm121")
SMALL = replace(M, vocab_size=512, d_model=128, n_layers=4, n_heads=2, n_kv_heads=1, d_ff=352, max_positions=512)
TINY = replace(SMALL, vocab_size=64, d_model=64, n_heads=4, n_kv_heads=2, d_head=16, d_ff=96, max_positions=64)
"""Models that Triton's interpreter runs in seconds."""
KINDS: Mapping[str, tuple[str, RoutingSpec]] = {
    "block": ("blocks", RoutingSpec()),
    "kept": ("keys of skipped tokens kept", RoutingSpec(skipped_keys_values="kept")),
    "mlp": (
        "MLPs, a linear adapter for skipped tokens",
        RoutingSpec(parts="mlp", gate="ones", combine="replace_ungated", skipped_result="adapter", adapter="linear"),
    ),
    "attention": ("attention", RoutingSpec(parts="attention")),
    "separate": ("attention and MLP by a router each, sigmoid gates", RoutingSpec(parts="separate", gate="sigmoid")),
    "recursions": ("one router for two blocks", RoutingSpec(layers=EveryNth(every=3), blocks_per_router=2)),
    "predictor": ("predictors decide", RoutingSpec(selection="predictor", predictor_hidden=32)),
}
"""Name -> what is routed, in every other block where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work: a model in a shape, for a target.

    Attributes:
        name: of its files.
        kind: table of the page: `compiled`, `interpreted`, `nodes` or `plans`.
        title: what the model is, for people.
        spec: the model.
        bucket: rows, and tokens of a row.
        dtypes: of the engines.
        architecture: of the GPU that `inductor-cuda` generates code for.
    """

    name: str
    kind: str
    title: str
    spec: ModelSpec
    bucket: tuple[int, int]
    dtypes: tuple[str, ...]
    architecture: str = ""

    @property
    def target(self) -> str:
        """The target."""
        return TARGETS[self.kind]

    @property
    def config(self) -> str:
        """The configuration of its build."""
        dtypes = "[" + ", ".join(f'"{dtype}"' for dtype in self.dtypes) + "]"
        text = CONFIG.format(target=self.target, dtypes=dtypes, buckets=f"[{list(self.bucket)}]")
        return text + (f"architectures = {json.dumps(RTX)}\n" if self.kind == "plans" else "")


TARGETS = {
    "compiled": "inductor-cuda", "interpreted": "inductor-cuda", "nodes": "ort-cuda", "plans": "tensorrt-rtx"
}  # fmt: skip


def works() -> Iterator[Work]:
    """Yields all work."""
    for name, (title, routing) in KINDS.items():
        small, tiny = replace(SMALL, routing=routing), replace(TINY, routing=routing)
        yield Work(f"{name}-interpreted", "interpreted", f"tiny, {title}", tiny, (1, 32), ("float32",), "sm90")
        yield Work(f"{name}-interpreted-bf16", "interpreted", f"tiny, {title}", tiny, (1, 32), ("bfloat16",), "sm90")
        yield Work(f"{name}-nodes", "nodes", f"small, {title}", small, (1, 256), ("float32", "float16"))
        yield Work(f"{name}-plans", "plans", f"small, {title}", small, (1, 256), ("float16", "bfloat16"))
        yield Work(f"{name}-sm90", "compiled", f"small, {title}", small, (1, 256), ("bfloat16",), "sm90")
    for name, bucket, dtypes in (("row", (1, 512), ("float32", "bfloat16")), ("batch", (8, 2048), ("bfloat16",))):
        yield Work(f"{name}-nodes", "nodes", "M, blocks", M, bucket, ("float32", "float16"))
        yield Work(f"{name}-plans", "plans", "M, blocks", M, bucket, ("float16", "bfloat16"))
        for gpu in GPUS:
            yield Work(f"{name}-{gpu}", "compiled", "M, blocks", M, bucket, dtypes, gpu)


def plans(build: Path) -> list[dict[str, Any]]:
    """Returns a row for every plan that a build of `tensorrt-rtx` left, and for every one that it could not build."""
    report = report_from_json((build / "report.json").read_text(encoding="utf-8"))
    built = [
        {"engine": artifact.path.removeprefix("engines/"), "bytes": artifact.bytes, "refused": ""}
        for artifact in report.artifacts
        if artifact.kind == "engine"
    ]
    return [*built, *({"engine": "", "bytes": 0, "refused": row.sentence} for row in report.failed)]


def do(work: Work, results: Path, libraries: Path) -> None:
    """Does a piece of work in its process, which writes its rows to `results`.

    Raises:
        RuntimeError: the process failed.
    """
    folder, out = results / work.name, results / f"{work.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, config = folder / "model.pt", folder / "config.toml"
    save_checkpoint(checkpoint, random_checkpoint(work.spec, 0))
    config.write_text(work.config, encoding="utf-8")
    shared = [str(checkpoint), str(config)]
    build = [str(checkpoint), "-c", str(config), "-o", str(folder / "build")]
    beside = {"LD_LIBRARY_PATH": str(libraries)}
    code = [*shared, work.architecture, str(folder), str(out)]
    command, more = {
        "compiled": (["benchmarks.gpu_code.triton_kernels", *code], {}),
        "interpreted": (["benchmarks.gpu_code.interpreter", *code], {"TRITON_INTERPRET": "1"}),
        "nodes": (["benchmarks.gpu_code.ort_nodes", *shared, str(folder), str(out)], beside),
        "plans": (["mod_export", "build", *build, "--no-evidence"], {}),
    }[work.kind]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=os.environ | more, capture_output=True, text=True, timeout=LIMIT
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if work.kind == "plans" and (folder / "build" / "report.json").exists():
        # Its failures are rows.
        out.write_text(json.dumps(plans(folder / "build"), indent=1), encoding="utf-8")
    elif done.returncode or not out.exists():
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{work.name}: exit code {done.returncode}: {last}")


def missing() -> str:
    """Returns what is not installed here, if anything."""
    return ", ".join(name for name in NEEDED if not _version(name))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--results", type=Path, default=Path("build/gpu-code"))
    add("--docs", type=Path, default=Path("docs"))
    add("--only", default="", help="do work only whose name contains this")
    add("--again", action="store_true", help="do again what was done before, too")
    options = parser.parse_args(arguments)
    if absent := missing():
        print(f"make gpu-code: {absent} is not installed", file=sys.stderr)
        return 2
    capi = Path(importlib.util.find_spec("onnxruntime").submodule_search_locations[0]) / "capi"  # type: ignore[union-attr,index]
    libraries = options.results / "libraries"
    make_libraries(capi / "libonnxruntime_providers_cuda.so", libraries)
    found: list[dict[str, Any]] = []
    unfinished = 0
    every = list(works())
    for work in every:
        out = options.results / f"{work.name}.json"
        if options.only in work.name and (options.again or not out.exists()):
            print(work.name, flush=True)
            out.unlink(missing_ok=True)
            try:
                do(work, options.results, libraries)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                unfinished += 1
                print(f"  {error}", flush=True)
        if out.exists():
            found.append(row_of(work, json.loads(out.read_text(encoding="utf-8"))))
    versions = {name: _version(name) for name in NEEDED}
    results = {"versions": versions, "work": found, "planned": [work.name for work in every]}
    (options.docs / "gpu-code.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    render(options.docs)
    return int(unfinished > 0)


def row_of(work: Work, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a piece of work and what it found, as plain data."""
    batch, seq = work.bucket
    return {
        "name": work.name, "kind": work.kind, "model": work.title, "shape": f"{batch} x {seq}",
        "architecture": work.architecture, "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
