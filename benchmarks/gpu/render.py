"""Writes docs/gpu.md from gpu.json beside it, once `make gpu` has run: `python -m benchmarks.gpu.render [DOCS]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HEAD = """# On a GPU

`make gpu` wrote this page (`benchmarks/gpu/render.py`; do not edit). [guide.md](guide.md#on-an-nvidia-gpu) says how to
run it.

* **Model.** A Llama-like decoder of 40 M parameters (d=512, 12 layers, vocabulary 8,192) with initial weights, every
  other block routed at 12.5 %. `dense` has the same weights, with every token through every block. Engines return the
  logits of a row's last token.
* **Parity** is that of the build: against eager float32 PyTorch on the CPU, by the gates of the dtype
  ([evidence.md](evidence.md)).
* **Latency** is the median of model and dense baseline, interleaved in one process, from inputs in host memory to
  outputs in host memory ([evidence.md](evidence.md#latency)). Speed-up is dense / MoD. *One by one* is the same engine
  without its CUDA graph. The first table has all engines, the second those that were judged.
* **Memory** is the increase that nvidia-smi shows after an engine was loaded and run.
* Each step is a process of its own. A step that was not run has a reason.
"""


def render(docs: Path) -> None:
    """Writes gpu.md in the folder `docs`, from gpu.json there."""
    results = json.loads((docs / "gpu.json").read_text(encoding="utf-8"))
    (docs / "gpu.md").write_text(page(results), encoding="utf-8")


def page(found: dict[str, Any]) -> str:
    """Returns the page."""
    machine = found["machine"]
    versions = [
        f"{name} {machine[name]}" for name in ("torch", "onnxruntime", "tensorrt", "tensorrt_rtx") if machine[name]
    ]
    about = f"* **Machine.** {machine['gpu']} ({', '.join(machine['architectures'])}); {machine['cpu']}, "
    about += f"{machine['cores']} cores. {', '.join(versions)}.\n"
    return HEAD + about + "\n" + "\n".join(_tables(found["steps"]))


def _tables(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    ran = [step for step in steps if step["status"] == "ran"]
    builds = [step["found"] for step in ran if "parity" in step["found"]]
    devices = [step["found"] for step in ran if "memory" in step["found"]]
    yield _table(
        "## Latency",
        ["target", "dtype", "shape", "dense, ms", "MoD, ms", "dense / MoD", "one by one: dense", "MoD"],
        [line for device in devices for line in _latency(device)],
    )
    yield _table(
        "## Speed-up of judged engines",
        ["target", "dtype", "shape", "dense, ms", "MoD, ms", "speed-up", "predicted (FLOPs)"],
        [line for build in builds for line in _speed(build)],
    )
    yield _table(
        "## Parity",
        [
            "target",
            "dtype",
            "shape",
            "model",
            "gates",
            "largest error",
            "allowed",
            "same next token",
            "routed",
            "near-ties",
        ],
        [_parity(row) for build in builds for row in build["parity"]],
    )
    yield _table(
        "## Memory",
        ["engine", "MiB of the GPU", ""],
        [[row["engine"], str(row["mib"]), row["what"]] for device in devices for row in device["memory"]],
    )
    yield _table(
        "## Steps",
        ["step", "outcome", "seconds", ""],
        [[step["title"], _outcome(step), f"{step['seconds']:.0f}", _cell(step["reason"])] for step in steps],
    )


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["target"], row["dtype"], row["bucket"], row["model"]


def _latency(device: dict[str, Any]) -> Iterator[list[str]]:
    ms = {_key(row): row["p50_ms"] for row in device["times"]}
    alone = {_key(row): row["p50_ms"] for row in device["one_by_one"]}
    for setting in dict.fromkeys(_key(row)[:3] for row in device["times"]):
        dense, mod = ((*setting, kind) for kind in ("dense", "mod"))
        # One of the two engines may not have been built.
        ratio = f"{ms[dense] / ms[mod]:.2f}" if dense in ms and mod in ms else ""
        times = [f"{found[key]:.3g}" if key in found else "" for found in (ms, alone) for key in (dense, mod)]
        yield [*setting, *times[:2], ratio, *times[2:]]


def _speed(build: dict[str, Any]) -> Iterator[list[str]]:
    ms = {_key(row): row["p50_ms"] for row in build["latency"]}
    for row in build["speedup"]:
        setting = (row["target"], row["dtype"], row["bucket"])
        low, high = row["ci95"]
        yield [
            *setting,
            *(f"{ms[*setting, kind]:.3g}" for kind in ("dense", "mod")),
            f"{row['measured']:.2f} [{low:.2f}, {high:.2f}], {row['verdict']}",
            f"{row['predicted_flops']:.2f}",
        ]


def _parity(row: dict[str, Any]) -> list[str]:
    agreement = row["next_token_agreement"]
    return [
        row["target"], row["dtype"], row["bucket"], row["model"],
        "met" if row["passed"] else _cell("missed: " + "; ".join(row["reasons"])),
        f"{row['error']['max_abs']:.2g}", f"{row['allowed_max_abs']:.2g}",
        "" if agreement is None else f"{agreement:.2%}",
        f"{row['routed']:,}", f"{row['near_ties']:,}",
    ]  # fmt: skip


def _outcome(step: dict[str, Any]) -> str:
    if failed := step["found"].get("failed"):
        return _cell(f"{step['status']}, but {'; '.join(failed)}")
    verdict = step["found"].get("verdict", {"status": "pass"})["status"]
    return step["status"] if verdict == "pass" else f"{step['status']}, a gate failed"


def _cell(text: str) -> str:
    """Escapes the text of a process for a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"{title}\n\nNothing was run.\n"
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([title, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n"


if __name__ == "__main__":
    render(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
