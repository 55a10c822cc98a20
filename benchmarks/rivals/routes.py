"""Routes from a PyTorch model to logits of whole rows on a CPU: ours, and what a user would do instead.

A route is a step that writes files, and a function that opens them in the process that is timed. For our routes,
`mod-export build` writes the files and `mod_export.load` opens them. The rivals get the model as a user would write it:
`torch.topk` selects (PyTorch's exporter has no translation of a stable sort), everything else is the same code.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.rivals import programs
from benchmarks.rivals.cases import KINDS, Case, case_of, checkpoints, write_models
from mod_export import load
from mod_export.config import TargetOptions
from mod_export.measure.other_programs import Run, open_onnxruntime, open_openvino
from mod_export.types import ModelKind

Opened = Callable[[Path, str, int], Run]
"""(folder of the case, kind, threads) -> function that runs a batch."""
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
TARGETS = ("ort-cpu", "openvino", "inductor")
ANCHOR = "mod-export, ort-cpu"
"""The float32 route that takes turns with the routes of every precision, so that each table shows the gain over it."""
OUR_BUILD = """\
targets = ["{target}"]
buckets = [[{batch}, {seq}]]
outputs = "logits"

[target.{target}]
dtypes = [{dtypes}]

[generation]
build = "never"
"""


@dataclass(frozen=True)
class Route:
    """One route at one precision.

    Attributes:
        name: name of the route, unique within a precision.
        precision: precision of the matrix products.
        step: name in STEPS of the step that writes its files.
        open: function that opens the files.
        ours: whether it uses this project's engines.
    """

    name: str
    precision: str
    step: str
    open: Opened
    ours: bool = False


def our_dtypes(target: str) -> tuple[str, ...]:
    """Returns the compared precisions that a target can be configured to have."""
    options = TargetOptions.model_fields[target.replace("-", "_")].annotation
    assert options is not None
    offered = get_args(get_args(options.model_fields["dtypes"].annotation)[0])
    return tuple(dtype for dtype in PRECISIONS if dtype in offered)


def built(case: Case, folder: Path, target: str, dtype: str) -> None:
    """Runs `mod-export build` for both models, without evidence, because this benchmark compares all routes itself."""
    config = folder / f"{target}-{dtype}.toml"
    text = OUR_BUILD.format(target=target, batch=case.batch, seq=case.seq, dtypes=f'"{dtype}"')
    config.write_text(text, encoding="utf-8")
    words = ["build", str(folder / "mod.pt"), "-c", str(config), "-o", str(_built(folder, target, dtype))]
    run_ours([*words, "--no-evidence", "-q"])


def run_ours(words: list[str]) -> None:
    """Runs the command `mod-export`.

    Raises:
        RuntimeError: the command refused or failed; the message has its error output.
    """
    done = subprocess.run([sys.executable, "-m", "mod_export", *words], capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"mod-export {words[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def served(target: str, dtype: str, folder: Path, kind: ModelKind, threads: int) -> Run:
    """Opens an engine with `mod_export.load`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that nothing was verified, which `--no-evidence` asked for.
        opened = load(_built(folder, target, dtype), target, dtype, model=kind, threads=threads)
    return lambda feeds: opened.run(feeds["input_ids"])


def graph_of_ours(folder: Path, kind: str, case: Case) -> Path:
    """Path of the portable graph of a model, which `mod-export build` wrote."""
    return _built(folder, "ort-cpu", "float32") / "graphs" / f"{kind}-{case.bucket.name}.onnx"


def _built(folder: Path, target: str, dtype: str) -> Path:
    return folder / f"ours-{target}-{dtype}"


def _hinted(folder: Path, kind: str, threads: int) -> Run:
    return open_openvino(graph_of_ours(folder, kind, case_of(folder)), threads, "bf16")


def _compressed(precision: str, folder: Path, kind: str, threads: int) -> Run:
    path = folder / f"{kind}.{precision}-weights.xml"
    return open_openvino(path, threads, "bf16", programs.OPENVINO_GROUP[precision])


def _file(open_file: Callable[[Path, int], Run], name: str, folder: Path, kind: str, threads: int) -> Run:
    return open_file(folder / name.format(kind=kind), threads)


MODELS, PLAIN, PORTABLE = "models", "torch.onnx.export", "ours-ort-cpu-float32"
STEPS: dict[str, tuple[str | None, Callable[[Case, Path], None]]] = {
    MODELS: (None, write_models),
    PLAIN: (MODELS, programs.write_plain),
    "quantize_dynamic": (PLAIN, programs.write_dynamic_int8),
    "matmul_nbits": (PLAIN, programs.write_nbits_int4),
    "nncf-int8-weights": (PLAIN, partial(programs.write_compressed, "int8")),
    "nncf-int4-weights": (PLAIN, partial(programs.write_compressed, "int4")),
    "nncf-int8": (PLAIN, programs.write_quantized),
    **{
        f"ours-{target}-{dtype}": (MODELS, partial(built, target=target, dtype=dtype))
        for target in TARGETS
        for dtype in our_dtypes(target)
    },
}
"""Name -> (the step that it needs, if any; the function that writes its files)."""
ROUTES: tuple[Route, ...] = (
    *(
        Route(f"mod-export, {target}", dtype, f"ours-{target}-{dtype}", partial(served, target, dtype), ours=True)
        for dtype in PRECISIONS
        for target in TARGETS
        if dtype in our_dtypes(target)
    ),
    Route("ONNX Runtime", "float32", PLAIN, partial(_file, open_onnxruntime, "{kind}.plain.onnx")),
    Route("OpenVINO", "float32", PLAIN, partial(_file, partial(open_openvino, precision="f32"), "{kind}.plain.onnx")),
    Route("torch.compile", "float32", MODELS, partial(programs.compiled_torch, "float32")),
    Route("OpenVINO", "bfloat16", PLAIN, partial(_file, partial(open_openvino, precision="bf16"), "{kind}.plain.onnx")),
    Route("OpenVINO, our graph", "bfloat16", PORTABLE, _hinted),
    Route("torch.compile", "bfloat16", MODELS, partial(programs.compiled_torch, "bfloat16")),
    Route("ONNX Runtime, dynamic", "int8", "quantize_dynamic",
          partial(_file, open_onnxruntime, "{kind}.dynamic-int8.onnx")),
    Route("OpenVINO, weights", "int8", "nncf-int8-weights",
          partial(_compressed, "int8")),
    Route("OpenVINO, quantized", "int8", "nncf-int8",
          partial(_file, partial(open_openvino, precision="bf16"), "{kind}.int8.xml")),
    Route("ONNX Runtime, MatMulNBits", "int4", "matmul_nbits",
          partial(_file, open_onnxruntime, "{kind}.nbits-int4.onnx")),
    Route("OpenVINO, weights", "int4", "nncf-int4-weights",
          partial(_compressed, "int4")),
)  # fmt: skip


def opened(route: Route, case: Case, folder: Path, threads: int) -> dict[str, Callable[..., Any]]:
    """Actions of a route for a `turns.Worker`: one for each kind, which runs the model once, and `quality`."""
    feeds = case.feeds
    runs = {kind: route.open(folder, kind, threads) for kind in KINDS}

    def once(kind: str) -> None:
        runs[kind](feeds)

    def quality(kind: str) -> dict[str, float]:
        expected_BSV = np.load(folder / f"{kind}.logits.npy", mmap_mode="r")
        return compared(np.asarray(runs[kind](feeds)), expected_BSV)

    return {**{kind: partial(once, kind) for kind in KINDS}, "quality": quality}


def compared(found_BSV: np.ndarray, expected_BSV: np.ndarray) -> dict[str, float]:
    """Returns `agreement`, the share of tokens after which the same token is the most probable, and `error`, the root
    mean square of the logits' error over that of the logits. `error` leaves out the tenth of the tokens with the
    largest errors, because two router scores within rounding of each other may select another token.
    """
    same_BS = found_BSV.argmax(-1) == expected_BSV.argmax(-1)
    square_BS = np.square(found_BSV.astype(np.float64) - expected_BSV).mean(-1)
    kept = np.sort(square_BS, axis=None)[: max(1, square_BS.size * 9 // 10)]
    rms = float(np.sqrt(np.square(expected_BSV.astype(np.float64)).mean()))
    return {"agreement": float(same_BS.mean()), "error": float(np.sqrt(kept.mean())) / rms}


def write_reference(case: Case, folder: Path) -> None:
    """Writes the logits of the eager float32 models, which every route is compared with."""
    import torch

    for kind, checkpoint in checkpoints(folder).items():
        with torch.no_grad():
            (logits_BSV,) = checkpoint.module()(*(torch.from_numpy(array) for array in case.feeds.values()))
        np.save(folder / f"{kind}.logits.npy", logits_BSV.numpy())
