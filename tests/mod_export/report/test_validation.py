"""What `mod-export validate` prints, from rows as validation makes them."""

from __future__ import annotations

import math
from dataclasses import replace

from comparisons import GATE, GOOD, errors, with_noise, with_routing

from mod_export.artifacts import Bucket, ModelKind
from mod_export.measure.verdict import Verdict
from mod_export.report.validation import render_validation
from mod_export.validate.causality import CausalityRow
from mod_export.validate.parity import Comparison
from mod_export.validate.rows import ParityRow, judge
from mod_export.validate.structure import StructureRow

PASSED = Verdict(status="pass", reasons=())
COLUMNS = [
    "target", "bucket", "dtype", "model", "parity", "routed alike", "near-ties", "max error", "rounding", "next token",
    "KL", "perplexity", "ties", "causal",
]  # fmt: skip


def parity(*found: Comparison, model: ModelKind = "mod", target: str = "ort-cpu") -> ParityRow:
    return judge(found, GATE, target=target, bucket=Bucket(1, 64), dtype="float32", model=model)


def causality(*, causal: bool, model: ModelKind = "mod", target: str = "ort-cpu") -> CausalityRow:
    return CausalityRow(
        target=target, bucket="b1s64", dtype="float32", model=model, suffixes=4, causal=causal,
        earliest_change=None if causal else 3, largest_change=0.5,
        statement="nothing speaks against it" if causal else "must not be used",
    )  # fmt: skip


def structure(path: str, *reasons: str) -> StructureRow:
    return StructureRow(path=path, checked=("bytes",), passed=not reasons, reasons=reasons)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_one_line_for_each_candidate() -> None:
    rows = [replace(parity(with_noise(1e-5, 1e-6)), ties_exact=True), parity(replace(GOOD, layers=()), model="dense")]
    causal = [causality(causal=False), causality(causal=True, model="dense")]
    head, rule, *lines = render_validation([], rows, causal, PASSED).splitlines()
    assert cells(head) == COLUMNS
    assert set(rule) == {"-"}
    assert cells(lines[0]) == [
        "ort-cpu", "b1s64", "float32", "mod", "pass", "all 4", "0", "1.0e-05", "1.0e-05", "100 %", "1.0e-09",
        "7.3891", "yes", "NO",
    ]  # fmt: skip
    assert cells(lines[1])[3:] == [
        "dense", "pass", "-", "0", "1.0e-05", "-", "100 %", "1.0e-09", "7.3891", "-", "yes"
    ]  # fmt: skip


def test_a_candidate_that_failed() -> None:
    bad = replace(with_routing(0.005, 0.5), error=errors(math.nan), kl=math.nan, text=None, kind="random")
    row = replace(parity(bad), ties_exact=False)
    (line,) = render_validation([], [row], [], PASSED).splitlines()[2:3]
    assert cells(line)[4:] == ["FAIL", "all 8", "1", "nan", "-", "100 %", "nan", "-", "NO", "-"]


def test_lines_are_never_cut() -> None:
    """A log has no width."""
    row = parity(GOOD, target="tensorrt-rtx graph with a name that is rather long, " * 5 + "end")
    assert "long, end   b1s64" in render_validation([], [row], [], PASSED)


def test_files_are_counted_once_however_often_they_were_looked_at() -> None:
    good = [structure("graphs/a.onnx"), structure("graphs/a.onnx"), structure("graphs/b.onnx")]
    said = render_validation(good, [], [], PASSED)
    assert "files: all 2 are as they were built; weights are the checkpoint's, bit for bit\n" in said
    bad = [*good, structure("graphs/a.onnx", "no output logits"), structure("graphs/a.onnx", "changed")]
    assert "files: 1 of 2 are not what they must be, see below\n" in render_validation(bad, [], [], PASSED)
    assert "files:" not in render_validation([], [], [], PASSED)


def test_each_model_has_one_statement_and_the_worst_one_counts() -> None:
    rows = [
        causality(causal=True),
        causality(causal=False, target="inductor"),
        causality(causal=True, model="dense"),
    ]
    said = render_validation([], [], rows, PASSED).splitlines()
    assert "mod: must not be used (inductor b1s64)" in said
    assert "dense: nothing speaks against it (ort-cpu b1s64)" in said
    assert len([line for line in said if line.startswith(("mod:", "dense:"))]) == 2


def test_the_verdict_comes_last_with_every_reason() -> None:
    said = render_validation([], [parity(GOOD)], [], Verdict(status="fail", reasons=("one", "two \x1b[31m")))
    assert said.endswith("  - one\n  - two \\x1b[31m\nFAIL\n")
    assert render_validation([], [parity(GOOD)], [], PASSED).endswith("\n\nPASS\n")
