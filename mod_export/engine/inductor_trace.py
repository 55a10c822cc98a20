"""AOTInductor's kernels: which weights each call of a package reads, from its own source, and how long each call takes.

A package holds the C++ that it was compiled from, one call after the other without branches, so the i-th call that the
profiler sees is the i-th call of the source.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mod_export.artifacts import Kernel
from mod_export.errors import EngineError

__all__ = ["calls_of_package", "kernels_of_calls"]

US_PER_MS = 1000
CALL = re.compile(r"^\s*(?:AOTI_TORCH_ERROR_CODE_CHECK\()?(aoti_torch_cpu_\w+|cpp_fused_\w+)\((.*)\);", re.MULTILINE)
CONSTANT = re.compile(r'constants_info_\[(\d+)\]\.(?:name|original_fqn) = "([^"]*)";')
KERNEL = re.compile(r"(?:^|_)(aoti_torch_cpu_\w+|cpp_fused_\w+)$")

Call = tuple[str, tuple[str, ...]]


def calls_of_package(path: Path) -> tuple[Call, ...]:
    """(kernel, state_dict names of the constants it is given) of every call of a package, in order."""
    with zipfile.ZipFile(path) as package:
        names = [name for name in package.namelist() if name.endswith(".wrapper.cpp")]
        source = "\n".join(package.read(name).decode() for name in names)
    pairs = defaultdict(list)
    for index, name in CONSTANT.findall(source):
        pairs[index].append(name)
    stored = {found[0]: found[-1] for found in pairs.values()}
    return tuple(
        (kernel, tuple(dict.fromkeys(stored[word] for word in re.findall(r"\w+", arguments) if word in stored)))
        for kernel, arguments in CALL.findall(source)
    )


def kernels_of_calls(run: Callable[[], Any], runs: int, calls: Sequence[Call], where: str) -> tuple[Kernel, ...]:
    """Kernels of `runs` runs, in the order in which they first ran; equal calls together.

    None of them where a package has no marks for the profiler: torch writes them on Linux and on Windows only.

    Raises:
        EngineError: the package did not run the same way every time.
    """
    # Otherwise torch's profiler writes to stderr when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(runs):
            run()
    events = sorted(profiler.events() or (), key=lambda event: event.time_range.start)
    found = [(match[1], event) for event in events if (match := KERNEL.search(event.name))]
    names = [name for name, _ in found]
    length = len(found) // runs
    if names != names[:length] * runs:
        raise EngineError(
            f"{where}: torch's profiler saw {len(found)} kernels in {runs} runs, expected the same ones in every run; "
            "build the engine again with this mod-export"
        )
    known = [name for name, _ in calls] == names[:length]
    identities = list(calls) if known else [(name, ()) for name in names[:length]]
    taken: dict[Call, list[float]] = defaultdict(lambda: [0.0] * runs)
    for number, (_, event) in enumerate(found):
        taken[identities[number % length]][number // length] += event.cpu_time_total / US_PER_MS
    return tuple(
        Kernel(name=name, operator=name, weights=weights, ms=min(ms_by_run))
        for (name, weights), ms_by_run in taken.items()
    )
