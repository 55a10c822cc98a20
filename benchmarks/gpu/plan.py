"""Steps of `make gpu`: the command of each step, and which of its results are kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mod_export.rows.report import report_from_json
from mod_export.types import Availability
from mod_models.spec import ModelSpec, RoutingSpec

SPEC = ModelSpec(
    vocab_size=8192, d_model=512, n_layers=12, n_heads=8, n_kv_heads=4, d_head=64, d_ff=1408, max_positions=2048,
    routing=RoutingSpec(),
)  # fmt: skip
"""A Llama-like decoder of 40 M parameters, with initial weights; every other block is routed at 12.5 %."""
DEVICE = Path(__file__).with_name("device.py").resolve()
SHOWN_LINES = 3
CONFIG = """\
buckets = {buckets}
targets = ["{target}"]
# The logits of a row's last token, as sampling reads them: those of all tokens would be timed on their way to the host.
outputs = "last"

[parity]
text_batches = 1

[latency]
min_speedup = 0.0
max_seconds = 6.0

[generation]
build = "never"

[target.{target}]
dtypes = {dtypes}
"""
DECODE = (
    "no target of mod-export runs steps on a GPU: inductor-cuda and ort-cuda build engines for whole rows only, and "
    "plans of tensorrt and tensorrt-rtx that write text are run by a server, which keeps the cache on the GPU"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One process.

    Attributes:
        name: name of its files under steps/.
        title: description for people.
        target: the target that has to run here.
        needs: name of a step whose build folder it uses, if any.
        seconds: time limit.
        files: files to write before it starts: name in its folder -> content.
        command: command that runs in its folder.
        collect: function that reads the results from its folder.
        never: why it runs on no machine; empty if it can run.
    """

    name: str
    title: str
    target: str
    needs: str | None = None
    seconds: float = 0.0
    files: Mapping[str, str]
    command: Sequence[str] = ()
    collect: Callable[[Path], dict[str, Any]]
    never: str = ""


def steps_of(
    target: str, dtypes: Sequence[str], bucket: tuple[int, int], checkpoint: Path, more: str = "", name: str = ""
) -> tuple[Step, Step, Step]:
    """Steps of one target at one shape: engines are built, then timed, then judged with all evidence.

    Timing takes half a minute, so there are figures even if no time is left for judging.

    Args:
        more: further options of the target.
        name: end of the steps' names, where there are several of a target and shape.
    """
    rows, seq = bucket
    listed = "[" + ", ".join(f'"{dtype}"' for dtype in dtypes) + "]"
    config = CONFIG.format(target=target, dtypes=listed, buckets=f"[[{rows}, {seq}]]") + more
    name, title = f"{target}-{rows}x{seq}{name}", f"{target}, {', '.join(dtypes)}, {rows} x {seq}"
    build = [sys.executable, "-m", "mod_export", "build", str(checkpoint.resolve()), "-c", "config.toml", "-o"]
    engines = Step(
        name=name,
        title=f"{title}: engines",
        target=target,
        # AOTInductor compiles each of the two engines for a minute and a half.
        seconds=300.0 if target == "inductor-cuda" else 120.0,
        files={"config.toml": config},
        command=[*build, "build", "--no-evidence"],
        collect=engine_files,
    )
    timed = Step(
        name=f"{name}-device",
        title=f"{title}: memory and latency",
        target=target,
        needs=name,
        seconds=90.0,
        files={},
        command=[sys.executable, str(DEVICE), f"../{name}/build", "device.json"],
        collect=found_on_device,
    )
    judged = replace(
        engines,
        name=f"{name}-evidence",
        title=f"{title}: judged",
        needs=name,
        seconds=300.0,
        command=[*build, f"../{name}/build"],
        collect=lambda folder: found_by_build(folder.parent / name / "build"),
    )
    return engines, timed, judged


def planned(arch: str, checkpoint: Path) -> list[Step]:
    """Returns the steps, the most informative first, because the time may not be enough for all.

    Args:
        arch: architecture of the GPU, such as sm90.
        checkpoint: the checkpoint that every build reads.
    """
    row, batch = (1, 512), (8, 2048)
    more = {"tensorrt-rtx": f'architectures = ["{arch}"]\n'}
    graphs = ("ort-cuda", "tensorrt", "tensorrt-rtx")
    triples = [
        *(steps_of(target, ["float16", "float32"], row, checkpoint, more.get(target, "")) for target in graphs),
        *(steps_of(target, ["float16"], batch, checkpoint, more.get(target, "")) for target in graphs),
        *(steps_of("inductor-cuda", ["bfloat16"], bucket, checkpoint) for bucket in (row, batch)),
        steps_of("inductor-cuda", ["float32"], row, checkpoint, name="-float32"),
    ]
    none = Step(
        name="decode", title="steps of writing text", target="", files={}, collect=lambda folder: {}, never=DECODE
    )
    # Timing takes less time than judging, so it comes first.
    return [
        *(step for engines, timed, _ in triples for step in (engines, timed)),
        *(judged for _, _, judged in triples),
        none,
    ]


def why_not(step: Step, availability: Mapping[str, Availability], ran: Mapping[str, bool]) -> str:
    """Returns why a step cannot run here, or an empty text if it can. `ran` tells which earlier steps ran."""
    if step.never:
        return step.never
    available = availability[step.target]
    if not (available.builds and available.runs):
        return f"{step.target}: {available.reason}"
    if step.needs is not None and not ran.get(step.needs, False):
        return f"{step.needs} left no engines"
    return ""


def engine_files(folder: Path) -> dict[str, Any]:
    """Returns the engines that were built, what could not be built, and the seconds of every stage."""
    report = report_from_json((folder / "build" / "report.json").read_text(encoding="utf-8"))
    engines = [artifact for artifact in report.artifacts if artifact.kind == "engine"]
    return {
        "failed": [row.sentence for row in report.failed],
        "engines": [{"path": artifact.path, "bytes": artifact.bytes} for artifact in engines],
        "stages": {stage.name: stage.seconds for stage in report.stages},
    }


def found_by_build(build: Path) -> dict[str, Any]:
    """Returns the rows of a build folder's report.json for engines that ran here, without single samples."""
    report = report_from_json((build / "report.json").read_text(encoding="utf-8"))
    targets = {row.target for row in report.latency}
    parity = [row for row in report.parity if row.target in targets]
    return {
        "verdict": report.verdict.model_dump(mode="json"),
        "parity": [
            row.model_dump(mode="json", include={"target", "dtype", "bucket", "model", "passed", "reasons", "error",
                "allowed_max_abs", "next_token_agreement"})
            | {"routed": row.routing.routed, "agreed": row.routing.agreed, "near_ties": row.routing.near_ties}
            for row in parity
        ],
        "latency": [
            row.model_dump(mode="json", include={"target", "dtype", "bucket", "model", "p50_ms", "p90_ms", "flags"})
            for row in report.latency
        ],
        "speedup": [
            row.model_dump(mode="json", include={"target", "dtype", "bucket", "measured", "ci95", "predicted_flops",
                "verdict"})
            for row in report.speedup
        ],
        "precision": [
            row.model_dump(mode="json", include={"target", "dtype", "bucket", "model", "measured", "ci95"})
            for row in report.precision
        ],
        "stages": {stage.name: stage.seconds for stage in report.stages},
    }  # fmt: skip


def found_on_device(folder: Path) -> dict[str, Any]:
    """Returns the results that `device.py` wrote."""
    results: dict[str, Any] = json.loads((folder / "device.json").read_text(encoding="utf-8"))
    return results
