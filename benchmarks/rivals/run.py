"""What `make bench` runs: whole rows and text, every precision, at one and at all cores; then docs/results.md.

    python -m benchmarks.rivals.run [--only PATTERN,...] [--text-model DIR] [--text FILE] [--cases NAME,...]
                                              [--text-sizes M,1B] [--threads 1,2] [--results DIR] [--seconds N]
                                              [--again] [--list]

A cell is one case, precision and number of threads, such as rows-M-s512-b1-v8192-float32-t1 or text-SmolLM2-int4-t2,
and --only takes patterns of such names ('text-*', '*-bfloat16-*'). Cells that were measured before are kept, so a run
that was stopped goes on where it was; --again measures them anew. One that other programs disturbed is marked.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rivals import measure_case, measure_text
from benchmarks.rivals.cases import CASES, SIZES, Case
from benchmarks.rivals.render import keep, render
from benchmarks.rivals.routes import PRECISIONS
from benchmarks.rivals.text_models import TextCase
from mod_export.environment import usable_cores
from mod_export.measure.turns import reason_of

CASE = re.compile(r"(\w+)-s(\d+)-b(\d+)-v(\d+)")
INITIAL = {
    case.name: case
    for case in (
        TextCase("M", capacity=0.125),
        TextCase("1B", vocab=128_256, prompt=256, new=32, window=512, judged=128, anchored=False),
    )
}
"""Models with initial weights that write text. All programs are open at once: 1B needs 24 GiB of memory in int8 and
int4, and more in float32, which is therefore not measured beside these.
"""


@dataclass(frozen=True)
class Cell:
    """One measurement: `measure(folder)`. All cells of a `subject` share the files in the folder."""

    subject: str
    name: str
    measure: Callable[[Path], dict[str, Any]]


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    """Yields all cells that were asked for. Cells of one subject come one after the other."""
    for case in given.cases:
        yield from _cells(f"rows-{case.name}", given, partial(measure_case.measure, case))
    for text in text_cases(given):
        yield from _cells(f"text-{text.name}", given, partial(measure_text.measure, text))


def text_cases(given: argparse.Namespace) -> list[TextCase]:
    """Returns the given model, if any, and those with initial weights."""
    cases = [INITIAL[size] for size in given.text_sizes]
    if given.text_model is not None:
        model = given.text_model.resolve()
        text = "" if given.text is None else str(given.text.resolve())
        cases.insert(0, TextCase(given.text_name or model.name, str(model), text))
    return cases


def _cells(subject: str, options: argparse.Namespace, measure: Callable[..., dict[str, Any]]) -> Iterator[Cell]:
    for precision in PRECISIONS:
        for threads in options.threads:
            name = f"{subject}-{precision}-t{threads}"
            if any(fnmatch(name, pattern) for pattern in options.only):
                yield Cell(subject, name, partial(_measured, measure, precision, threads, options.seconds))


def _measured(
    measure: Callable[..., dict[str, Any]], precision: str, threads: int, seconds: float, folder: Path
) -> dict[str, Any]:
    return measure(precision, threads, seconds, folder)


def main(words: Sequence[str] | None = None) -> int:
    options = _given(words)
    wanted = list(cells(options))
    if options.list:
        print("\n".join(cell.name for cell in wanted))
        return 0
    failed = 0
    for index, cell in enumerate(wanted):
        path = options.results / f"{cell.name}.json"
        if path.exists() and not options.again:
            print(f"{cell.name}: measured before")
        else:
            failed += not _run(cell, path, options.results / "files" / cell.subject)
        if index + 1 == len(wanted) or wanted[index + 1].subject != cell.subject:
            shutil.rmtree(options.results / "files" / cell.subject, ignore_errors=True)
    samples = options.docs / "benchmarks"
    if options.beside:
        keep(options.results, samples / options.beside)
    render(samples if options.beside else options.results, options.docs)
    return 1 if failed else 0


def _run(cell: Cell, path: Path, files: Path) -> bool:
    """Measures a cell, writes its file once it is complete, and prints failures. Returns whether there is a file."""
    begin = time.monotonic()
    print(f"{cell.name} ...", flush=True)
    try:
        results = cell.measure(files)
    except Exception as error:  # The other cells can still be measured.
        print(f"{cell.name}: FAILED: {reason_of(error)}", flush=True)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results), encoding="utf-8")
    part.replace(path)
    print(f"{cell.name}: measured, {time.monotonic() - begin:.0f} s", flush=True)
    for name, route in results["routes"].items():
        if route["failed"]:
            print(f"  {name}: {route['failed']}", flush=True)
    return True


def case_named(text: str) -> Case:
    """Parses the name of a case, such as M-s512-b1-v8192."""
    match = CASE.fullmatch(text)
    if match is None or match[1] not in SIZES:
        raise argparse.ArgumentTypeError(f"{text}: expected a case such as M-s512-b1-v8192, of {', '.join(SIZES)}")
    return Case(match[1], *map(int, match.groups()[1:]))


def text_size(text: str) -> str:
    """Checks the name of a model with initial weights that writes text."""
    if text not in INITIAL:
        raise argparse.ArgumentTypeError(f"{text}: expected one of {', '.join(INITIAL)}")
    return text


def _given(words: Sequence[str] | None) -> argparse.Namespace:
    def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [read(item) for item in text.split(",") if item]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", type=several(str), default=["*"], help="patterns of cells; all by default")
    parser.add_argument("--cases", type=several(case_named), default=list(CASES), help="of whole rows")
    parser.add_argument("--threads", type=several(int), default=sorted({1, usable_cores()}))
    parser.add_argument("--text-model", type=Path, help="a dense checkpoint, such as `mod-export convert` writes")
    parser.add_argument("--text-name", help="what tables call it; the name of its folder by default")
    parser.add_argument("--text", type=Path, help="prompts for it; pages of this project by default")
    parser.add_argument("--text-sizes", type=several(text_size), default=["M"], help="models with initial weights")
    parser.add_argument("--seconds", type=float, default=15.0, help="of sampling for each cell; some rounds at least")
    parser.add_argument("--results", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--beside", metavar="NAME", help="leave the page's results, and add tables of this machine")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--list", action="store_true", help="name the cells, and measure nothing")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
