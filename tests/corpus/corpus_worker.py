"""One entry in a process of its own: python corpus_worker.py NAME ROWS.jsonl TARGET..."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from corpus_table import ENTRIES
from corpus_work import run


def main(name: str, rows: str, *targets: str) -> None:
    """Writes a line for each target."""
    warnings.simplefilter("ignore")  # Those of the packages about themselves.
    torch.set_num_threads(1)
    found = run(ENTRIES[name], targets)
    Path(rows).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
