"""Real model classes of PyPI packages, routed, through every target that needs no GPU: what `make corpus` runs.

    make corpus ARGS="--only transformers.Llama --targets ort-cpu openvino", or python -m benchmarks.corpus.run ...

Every entry of the table runs in its own process with a time limit. Each (entry, target) leaves a line in
build/corpus/results.jsonl, so a second start continues where the first one stopped; --fresh repeats the chosen entries.
Writes docs/corpus.md from all lines. The exit code is 1 if an entry is not as the table says.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.corpus.entry import Entry
from benchmarks.corpus.render import render
from benchmarks.corpus.table import ENTRIES
from benchmarks.corpus.work import TARGETS, Row
from benchmarks.corpus.worker import SECONDS, run_apart, stop

SHOWN = 160


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", default=[""], metavar="TEXT", help="entries with one of these texts in their name")
    add("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    add("--fresh", action="store_true", help="do again what was done before")
    add("--failed", action="store_true", help="do again what is not as the table says")
    add("--jobs", type=int, default=1, help="processes at once")
    add("--seconds", type=float, default=SECONDS, help="limit of one target (%(default)s)")
    add("--results", type=Path, default=Path("build/corpus"))
    add("--docs", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    chosen = [entry for name, entry in ENTRIES.items() if any(text in name for text in options.only)]
    if not chosen:
        parser.error(f"no entry has {' or '.join(options.only)} in its name")
    options.results.mkdir(parents=True, exist_ok=True)
    lines = options.results / "results.jsonl"
    again = {(entry.name, target) for entry in chosen for target in options.targets}
    before = read(lines)
    known = {
        key: row
        for key, row in before.items()
        if not (key in again and (options.fresh or (options.failed and not as_expected(ENTRIES[key[0]], row))))
    }
    if len(known) < len(before):
        _write(lines, known.values())
    work = [(entry, [target for target in options.targets if (entry.name, target) not in known]) for entry in chosen]
    work = [(entry, targets) for entry, targets in work if targets]
    print(f"{len(chosen)} entries, {len(chosen) - len(work)} done before", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run_apart, entry, targets, options.seconds) for entry, targets in work]
        try:
            for number, done in enumerate(as_completed(waiting), 1):
                rows = done.result()
                with lines.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                print(f"[{number}/{len(work)}] {_shown(rows)}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise
    all_rows = [row for row in read(lines).values() if row["name"] in ENTRIES]
    render(all_rows, options.docs / "corpus.md")
    wrong = [row for row in all_rows if not as_expected(ENTRIES[row["name"]], row)]
    print(f"{len(all_rows)} rows, {len(all_rows) - len(wrong)} as expected, {len(wrong)} not", flush=True)
    return 1 if wrong else 0


def as_expected(entry: Entry, row: Row) -> bool:
    """Whether the row passed, or the entry was refused as the table says."""
    if entry.refused:
        return row["status"] == "refused" and entry.refused in row["sentence"]
    return bool(row["status"] == "pass")


def read(lines: Path) -> dict[tuple[str, str], Row]:
    """Returns the last row of every (entry, target). Skips a line that a stopped run left incomplete."""
    rows: dict[tuple[str, str], Row] = {}
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["name"], row["target"]] = row
    return rows


def _write(lines: Path, rows: Iterable[Row]) -> None:
    part = lines.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(lines)


def _shown(rows: Sequence[Row]) -> str:
    """One line for the entry, and one for each different message."""
    states = []
    for row in rows:
        error = f" {row['max_error']:.1e}" if "max_error" in row else ""
        states.append(f"{row['target']} {row['status']}{error}")
    seconds = sum(row["seconds"] for row in rows)
    sentences = {row["sentence"] for row in rows if row["sentence"]}
    shown = [f"    {' '.join(sentence.split())[:SHOWN]}" for sentence in sorted(sentences)]
    return "\n".join([f"{rows[0]['name']} ({rows[0]['manner']}): {', '.join(states)}, {seconds:.0f} s", *shown])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["OMP_NUM_THREADS"] = "1"  # The processes that start from here inherit it.
    sys.exit(main())
