"""Writes docs/corpus.md from the rows of a run."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.corpus.table import ENTRIES
from benchmarks.corpus.work import LARGEST_ERROR, RUNS, TARGETS, Row

INSTALLED = re.escape(sysconfig.get_path("purelib")) + "/"
SCRATCH = r"/\S*/corpus-\w+/"
ROOT = re.escape(str(Path(__file__).parents[2])) + "/"
HEAD = f"""# Corpus

Model classes of packages on PyPI, small and with random weights. In each, every other block, or parts of it, is wrapped
in a router that selects a quarter of the tokens (`benchmarks/corpus/routers.py`); nothing else of them is changed. Each goes through
`mod_export.build`: capture, the gates of parity, and engines of ONNX Runtime (`ort-cpu`), OpenVINO and AOTInductor (`inductor`).
Capture must find one routing site for each router that ran. Then the engines run inputs that the build has not seen. Each
number is the largest difference of an output value from PyTorch, divided by the root mean square of that output; {LARGEST_ERROR:g} is
allowed. Plans of TensorRT-RTX (float16, sm89) are built but not run, because that needs a GPU; parity is checked on their
graphs with ONNX Runtime.

`make corpus` writes this page, and goes on where it was stopped: `make corpus ARGS="--help"`. `make test-all` builds a third of the
entries for ort-cpu; which third depends on the commit.

"""  # noqa: E501
MANNERS = """## Manners

| manner | around | what it does |
|---|---|---|
"""


def render(rows: Sequence[Row], page: Path) -> None:
    """Writes the page of all rows, in the order of `ENTRIES`."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["target"]] = row
    order = [name for name in ENTRIES if name in by_name]
    page.write_text(
        HEAD + _totals(rows, by_name) + _table(order, by_name) + _sentences(order, by_name) + _manners(order),
        encoding="utf-8",
    )


def _totals(rows: Sequence[Row], by_name: dict[str, dict[str, Row]]) -> str:
    classes = {(row["package"], row["class"]) for row in rows}
    packages = Counter(package for package, _ in classes)
    shares = ", ".join(f"{count} of {package}" for package, count in packages.most_common())
    passed = [
        f"| {target} | {sum(row['status'] == 'pass' for row in judged)} | {len(judged)} | {_worst(judged)} |"
        for target in TARGETS
        if (judged := [row for row in rows if row["target"] == target])
    ]
    table = "| target | passed | entries | largest difference |\n|---|---|---|---|\n" + "\n".join(passed)
    return f"{len(by_name)} entries of {len(classes)} classes: {shares}.\n\n{table}\n\n"


def _worst(rows: Sequence[Row]) -> str:
    errors = [row["max_error"] for row in rows if row["status"] == "pass" and "max_error" in row]
    return f"{max(errors):.1e}" if errors else "not run"


def _table(order: Sequence[str], by_name: dict[str, dict[str, Row]]) -> str:
    lines = [f"| class | variant | manner | {' | '.join(TARGETS)} |", "|---" * (3 + len(TARGETS)) + "|"]
    text = ""
    releases: dict[str, list[str]] = {}
    for name in order:
        row = next(iter(by_name[name].values()))
        cells = " | ".join(_cell(by_name[name].get(target)) for target in TARGETS)
        line = f"| {row['class']} | {row['variant']} | {row['manner']} | {cells} |"
        releases.setdefault(f"{row['package']} {row['release']}", []).append(line)
    for release, table_lines in releases.items():
        text += "\n".join([f"## {release}\n", *lines, *table_lines]) + "\n\n"
    return text


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["status"] != "pass":
        return f"**{row['status']}**"
    return f"{row['max_error']:.1e}" if row["target"] in RUNS else "built"


def _sentences(order: Sequence[str], by_name: dict[str, dict[str, Row]]) -> str:
    """Messages of the rows that did not pass. Targets of an entry with the same message share one paragraph."""
    paragraphs = []
    for name in order:
        targets_by_sentence: dict[str, list[str]] = {}
        for target, row in by_name[name].items():
            if row["status"] != "pass":
                targets_by_sentence.setdefault(_without_places(row["sentence"]), []).append(target)
        paragraphs += [
            f"**{name}** ({', '.join(targets)}{_expected(name, sentence)}):\n\n{_quoted(sentence)}\n"
            for sentence, targets in targets_by_sentence.items()
        ]
    if not paragraphs:
        return ""
    return "## What did not pass, and what was said\n\n" + "\n".join(paragraphs) + "\n"


def _expected(name: str, sentence: str) -> str:
    refused = ENTRIES[name].refused
    return "; as it must be, the class is no static graph" if refused and refused in sentence else ""


def _without_places(sentence: str) -> str:
    """Removes the paths of packages, project and build folder on the machine of the run."""
    return re.sub(f"{INSTALLED}|{ROOT}|{SCRATCH}", "", sentence)


def _quoted(sentence: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in sentence.splitlines())


def _manners(order: Sequence[str]) -> str:
    used = {ENTRIES[name].manner.__name__: ENTRIES[name].manner for name in order}
    lines = [
        f"| {name} | {manner.around} | {' '.join((manner.__doc__ or '').split())} |"
        for name, manner in sorted(used.items())
    ]
    return MANNERS + "\n".join(lines) + "\n"
