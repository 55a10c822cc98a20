"""Opens the engines of `ort-cuda` with ONNX Runtime's CUDA provider, on a machine without a GPU.

    LD_LIBRARY_PATH=LIBRARIES python -m benchmarks.gpu_code.ort_nodes MODEL.pt CONFIG.toml FOLDER OUT.json

LIBRARIES stand in for CUDA's own (`cuda_runtime.py`). A build runs as it does beside a GPU, without evidence. Then each
engine is opened as mod-export opens it, which forbids that a node runs on the processor: ONNX Runtime refuses the
session if its CUDA provider has no kernel for a node. It needs its own process, and onnxruntime-gpu.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from benchmarks.gpu_code.building import build
from mod_export.engines import ENGINES, ort
from mod_export.engines.ort import CUDA
from mod_export.errors import ModExportError
from mod_export.folder.manifest import Manifest, open_folder
from mod_export.types import Availability, Engine, having

COPIES = ("MemcpyFromHost", "MemcpyToHost")
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
"""Operators that start no kernel, because their output is the memory of their input."""


def opened(root: Path, manifest: Manifest, engine: Engine) -> dict[str, Any]:
    """Opens an engine and returns a row: its nodes after ONNX Runtime's optimizations, or why it was refused."""
    row: dict[str, Any] = {"engine": engine.path.removeprefix("engines/"), "refused": "", "nodes": 0}
    try:
        ENGINES["ort-cuda"].load(root, engine, manifest.config, 0).close()
    except ModExportError as error:
        return row | {"refused": str(error)}
    counts = Counter(node.op_type for node in optimized(root, engine).graph.node)
    views, copies = (sum(counts[name] for name in names) for names in (VIEWS, COPIES))
    return row | {"nodes": counts.total(), "views": views, "copies": copies}


def optimized(root: Path, engine: Engine) -> onnx.ModelProto:
    """Returns the graph that the provider runs."""
    import onnxruntime

    assert engine.weights is not None
    path = root / "optimized.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path)
    weights = (root / engine.weights).resolve().parent
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    onnxruntime.InferenceSession(str(root / engine.path), options, providers=[CUDA])
    model = onnx.load(path, load_external_data=False)
    path.unlink()
    return model


def main(arguments: Sequence[str]) -> None:
    checkpoint, config, folder, out = arguments
    root = Path(folder) / "build"
    # CUDA's own libraries, which pip may have installed, would find no driver.
    ort.load_cuda_libraries = lambda: ""  # type: ignore[assignment]
    # ONNX Runtime looks for the device of a driver, and there is none.
    here = Availability(builds=True, runs=True, reason="libraries in the place of CUDA")
    ENGINES["ort-cuda"]._installed = lambda: here  # type: ignore[attr-defined]
    build(checkpoint, config, root)
    manifest = open_folder(root)
    rows = [opened(root, manifest, engine) for engine in having(manifest.engines, target="ort-cuda")]
    Path(out).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
