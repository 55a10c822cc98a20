"""Writes docs/gpu-code.md from gpu-code.json beside it: `python -m benchmarks.gpu_code.render [DOCS]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import SPEC as M
from mod_export.measure.gain import MACHINES, gain_of
from mod_export.model.transformer import TransformerModel
from mod_models.checkpoint import random_checkpoint

MIB = 2**20
KIB = 2**10
PREDICTED = ((1, 512), (1, 2048), (8, 2048), (32, 2048))
GPUS_OF_PLAN = ("h100", "rtx4090")
TEXTS = (1, 8, 32)

HEAD = """# GPU code, compiled without a GPU

`make gpu-code` wrote this page (`benchmarks/gpu_code/render.py`; do not edit). It needs no GPU and no driver. It
compiles what `make gpu` [runs](guide.md#on-an-nvidia-gpu) on three of the four targets for GPUs, as far as their
compilers go; TensorRT itself needs a GPU. **Nothing here ran on one**, so this page shows no speed.

Models have initial weights. M has 40 M parameters, the small ones four layers of width 128; all route every other
block, where nothing else is said. Engines return the logits of a row's last token.

{versions}
"""
KERNELS = """## Kernels of `inductor-cuda`

A build runs up to AOTInductor. Instead of a package, Inductor generates the kernels of the model and of its dense
baseline for a GPU that torch is only told about, and Triton and `ptxas` compile them to machine code, in every variant
from which a build chooses. *Launches* are kernels of Triton and calls of libraries (products of matrices) in one run.
*Shared* is the largest shared memory of a block, *spilled* the bytes of a thread that did not fit into registers.
Attention is written out in products and softmax here; torch with CUDA may call a fused kernel instead. The C++ code
that calls the kernels was not compiled, because that needs CUDA's headers.
"""
INTERPRETED = """## Results of `inductor-cuda`

Triton's interpreter executed the kernels that were generated for an H100, each in its first variant, one program of
the grid after the other, on the processor; torch's operators took the place of cuBLAS. The results are compared with
those of the exported program on the same inputs, operator by operator, in the same precision. *Error* is the largest
difference of the logits over their root mean square; in bfloat16, 0.04 is one step of rounding of the largest logits.
*Same selections* are the tokens that routers selected equally.
"""
NODES = """## Nodes of `ort-cuda`

ONNX Runtime's CUDA provider, of the published `onnxruntime-gpu`, opens each engine with libraries in the place of
CUDA's that do nothing. As always in mod-export, a node may not run on the processor: without a CUDA kernel for each
node, the session is refused. *Kernels* are the nodes after ONNX Runtime's optimizations, without *views*, which start
none; *copies* are those between host and device.
"""
PLANS = """## Plans of `tensorrt-rtx`

NVIDIA's compiler built one plan for each architecture. It translates the last step on the GPU that loads the plan, so
layers cannot be inspected here. It has none for sm90, and no float32 products, which routers need, on sm75.
"""
ROOFLINE = """## Predicted gain

By `mod-export plan`: dense time / MoD time if every product takes the time of its FLOPs or of reading its weights,
whichever is longer, and everything else takes none, in bfloat16. What is measured is less; a cell near 1.00 cannot
pay.
"""


def render(docs: Path) -> None:
    """Writes gpu-code.md in the folder `docs`, from gpu-code.json there."""
    results = json.loads((docs / "gpu-code.json").read_text(encoding="utf-8"))
    (docs / "gpu-code.md").write_text(page(results), encoding="utf-8")


def page(found: dict[str, Any]) -> str:
    """Returns the page."""
    work = found["work"]
    versions = "Compiled with " + ", ".join(f"{name} {number}" for name, number in found["versions"].items()) + "."
    parts = [
        HEAD.format(versions=versions),
        KERNELS,
        _table(
            ["model", "shape", "engine", "kernels, variants", "launches", "shared, KiB", "spilled", "failed", "GPUs"],
            _kernels([item for item in work if item["kind"] == "compiled"]),
        ),
        INTERPRETED,
        _table(
            ["model", "shape", "engine", "kernels", "error", "same selections"],
            [line for item in work if item["kind"] == "interpreted" for line in _interpreted(item)],
        ),
        NODES,
        _table(
            ["model", "shape", "engine", "kernels", "views", "copies", "refused"],
            list(dict.fromkeys(line for item in work if item["kind"] == "nodes" for line in _nodes(item))),
        ),
        PLANS,
        _table(
            ["model", "shape", "dtype", "architectures", "MiB, MoD and dense", "failed"],
            [line for item in work if item["kind"] == "plans" for line in _plans(item)],
        ),
        ROOFLINE,
        _table(["M", *(MACHINES[name].name for name in GPUS_OF_PLAN)], list(_predicted())),
    ]
    unfinished = sorted(set(found["planned"]) - {item["name"] for item in work})
    if unfinished:
        parts.append(f"## Not finished\n\n{', '.join(unfinished)}.\n")
    return "\n".join(parts)


def _kernels(work: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Architectures with the same figures share a line, and so do models with the same dense baseline."""
    architectures: dict[tuple[str, ...], list[str]] = {}
    for item in work:
        for row in item["rows"]:
            failed = "; ".join(f"{name}: {why}" for name, why in row["failed"].items())
            line = (
                _model(item, row), item["shape"], _short(row["engine"]), f"{row['kernels']}, {row['variants']}",
                f"{row['launches']} + {row['library']}", f"{row['shared'] / KIB:.1f}", str(row["stack"]), _cell(failed),
            )  # fmt: skip
            architectures.setdefault(line, []).append(item["architecture"])
    return [[*line, ", ".join(dict.fromkeys(names))] for line, names in architectures.items()]


def _model(item: dict[str, Any], row: dict[str, Any]) -> str:
    """Returns what an engine was made of: the models of a size have one dense baseline."""
    size, _, _ = item["model"].partition(", ")
    return size if _short(row["engine"]).startswith("dense") else item["model"]


def _interpreted(item: dict[str, Any]) -> Iterator[list[str]]:
    for row in item["rows"]:
        yield [
            item["model"], item["shape"], _short(row["engine"]), str(row["kernels"]), f"{row['error']:.1g}",
            f"{row['same']} of {row['selected']}" if row["selected"] else "",
        ]  # fmt: skip


def _nodes(item: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in item["rows"]:
        yield (
            _model(item, row), item["shape"], _short(row["engine"]),
            *(["", "", ""] if row["refused"] else map(str, (row["nodes"] - row["views"], row["views"], row["copies"]))),
            _cell(row["refused"]),
        )  # fmt: skip


def _plans(item: dict[str, Any]) -> Iterator[list[str]]:
    built = [row for row in item["rows"] if not row["refused"]]
    refused = "; ".join(row["refused"] for row in item["rows"] if row["refused"])
    parts = [(row, Path(row["engine"]).stem.split("-")) for row in built]
    for dtype in dict.fromkeys(part[-2] for _, part in parts):
        of_dtype = [(row, part) for row, part in parts if part[-2] == dtype]
        of_kind = [[row["bytes"] for row, part in of_dtype if part[0] == kind] for kind in ("mod", "dense")]
        architectures = dict.fromkeys(part[-1] for _, part in of_dtype)
        mib = " and ".join(f"{max(sizes, default=0) / MIB:.1f}" for sizes in of_kind)
        yield [item["model"], item["shape"], dtype, ", ".join(architectures), mib, ""]
    if refused:
        yield [item["model"], item["shape"], "", "", "", _cell(refused)]


def _predicted() -> Iterator[list[str]]:
    model = TransformerModel(random_checkpoint(M, 0))
    dense = model.dense()
    assert dense is not None
    gains = {
        (name, shape): gain_of(model, dense, MACHINES[name], *shape, 2 * shape[1], TEXTS)
        for name in GPUS_OF_PLAN
        for shape in PREDICTED
    }
    for rows, seq in PREDICTED:
        prompts = [f"{gains[name, (rows, seq)].prefill:.2f}" for name in GPUS_OF_PLAN]
        yield [f"rows, {rows} x {seq}", *prompts]
    for number in TEXTS:
        steps = [f"{gains[name, PREDICTED[0]].texts[number]:.2f}" for name in GPUS_OF_PLAN]
        yield [f"steps of {number} text{'s' if number > 1 else ''} of 1,024 tokens", *steps]


def _short(engine: str) -> str:
    """`inductor-cuda/mod-b1s512-bfloat16.pt2` as `mod bfloat16`."""
    kind, *_, dtype = Path(engine).stem.split("-")
    return f"{kind} {dtype}"


def _cell(text: str) -> str:
    """Escapes the text of a process for a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Nothing was compiled.\n"
    # What failed has a column if anything did.
    shown = [number for number in range(len(head)) if any(row[number] for row in rows)]
    lines = ["| " + " | ".join(row[number] for number in shown) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(shown) + "|", *lines[1:]]) + "\n"


if __name__ == "__main__":
    render(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
