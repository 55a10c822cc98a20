"""Every case in a process of its own, then docs/benchmarks.md: what `make bench` runs.

    python tests/benchmarks/run.py [--results DIR] [--sizes S,M,L] [--seq 128,512,2048] [--batch 1,4]
                                   [--vocab 8192,32000] [--seconds N] [--again]

What was measured before is kept, so a run that was stopped goes on where it was; --again measures everything anew.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from pathlib import Path

from measure_case import SIZES, save
from render import render

FRESH = multiprocessing.get_context("spawn")
"""A case inherits no memory, threads or caches."""
THREADS = 1


def cases(given: argparse.Namespace) -> list[tuple[str, int, int, int]]:
    """(size, tokens, batch, vocabulary), those that take least first."""
    found = itertools.product(given.sizes, given.seq, given.batch, given.vocab)
    return sorted(found, key=lambda case: (_work(*case), case))


def _work(size: str, seq: int, batch: int, vocab: int) -> float:
    width, layers = SIZES[size]["d_model"], SIZES[size]["n_layers"]
    return batch * seq * (12 * layers * width**2 + 2 * layers * width * seq + width * vocab)


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--seq", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--batch", type=numbers, default=[1, 4])
    parser.add_argument("--vocab", type=numbers, default=[8192, 32000])
    parser.add_argument("--seconds", type=float, default=20.0, help="of sampling for each case; five rounds at least")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    given = parser.parse_args()
    failed = 0
    for size, seq, batch, vocab in cases(given):
        name = f"{size}-s{seq}-b{batch}-v{vocab}"
        path = given.results / f"{name}.json"
        if path.exists() and not given.again:
            print(f"{name}: measured before")
            continue
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        process = FRESH.Process(target=save, args=(path, size, seq, batch, vocab, THREADS, given.seconds))
        process.start()
        process.join()
        failed += process.exitcode != 0
        outcome = "FAILED" if process.exitcode else "measured"
        print(f"{name}: {outcome}, {time.monotonic() - begin:.0f} s", flush=True)
    render(given.results, given.docs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
