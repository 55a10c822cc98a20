"""Measures the GPU memory of engines and their times, with CUDA graphs and with kernels that are launched one by one.

    python benchmarks/gpu/device.py BUILD OUT.json

It needs its own process, because the first engine in a process also loads the CUDA context and the libraries.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mod_export.config import BuildConfig
from mod_export.engines import ENGINES
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.measure.latency import measure_latency
from mod_export.model.model import tokens_sample
from mod_export.types import Engine, by_setting, having


def used_mib() -> int:
    """Returns the MiB of the first GPU's memory that all processes use together, from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0])


def measured(root: Path, used: Callable[[], int] = used_mib) -> dict[str, Any]:
    """Memory and times of every forward engine of a build folder, also without CUDA graphs if the target uses them."""
    manifest = open_folder(root)
    engines = having(manifest.engines, role="forward")
    memory = _memory(root, manifest, engines, used)
    plain = without_cuda_graphs(manifest.config, engines[0].target)
    return {
        "memory": memory,
        "times": _times(root, manifest, engines, manifest.config),
        "one_by_one": [] if plain is None else _times(root, manifest, engines, plain),
    }


def _feeds(manifest: Manifest, engine: Engine) -> dict[str, Any]:
    vocab_size = manifest.models["mod"].vocab_size
    assert vocab_size is not None
    return dict(tokens_sample(vocab_size, engine.bucket, manifest.config.seed))


def _memory(root: Path, manifest: Manifest, engines: list[Engine], used: Callable[[], int]) -> list[dict[str, Any]]:
    """Engines stay open until the end, because an allocator would reuse the memory of closed ones."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as opened:
        before = used()
        # The first engine is loaded twice; the second load shows its memory without context and libraries.
        for number, engine in enumerate([engines[0], *engines]):
            builder = ENGINES[engine.target]
            runner = opened.enter_context(builder.load(root, engine, manifest.config, 0))
            feeds = _feeds(manifest, engine)
            runner.run({name: array for name, array in feeds.items() if name in runner.inputs})
            now = used()
            what = "with context and libraries" if number == 0 else "one more engine"
            rows.append({"engine": engine.path, "what": what, "mib": now - before})
            before = now
    return rows


def without_cuda_graphs(config: BuildConfig, target: str) -> BuildConfig | None:
    """Returns the configuration with CUDA graphs off; None if the target does not use them."""
    name = target.replace("-", "_")
    options = getattr(config.target, name)
    if not getattr(options, "cuda_graph", False):
        return None
    plain = options.model_copy(update={"cuda_graph": False})
    return config.model_copy(update={"target": config.target.model_copy(update={name: plain})})


def _times(root: Path, manifest: Manifest, engines: list[Engine], config: BuildConfig) -> list[dict[str, Any]]:
    rows = [
        row
        for both in by_setting(engines).values()
        for row in measure_latency(root, both, _feeds(manifest, both["mod"]), config)
    ]
    kept = {"target", "dtype", "bucket", "model", "p50_ms", "p90_ms"}
    return [row.model_dump(mode="json", include=kept) for row in rows]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measured(Path(sys.argv[1]))), encoding="utf-8")
