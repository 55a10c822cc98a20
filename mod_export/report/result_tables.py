"""The columns of all tables of results: on the console, in `validate` and `bench`, and on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mod_export.report.charts import name_of
from mod_export.report.summary import Found
from mod_export.report.tables import Cell, Column, State, judged
from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    ci_text,
    error_text,
    interval_text,
    ms_text,
    range_text,
    ratio_text,
    share_text,
)
from mod_export.rows.base import FailedRow
from mod_export.rows.correctness import OutputParity, ParityRow
from mod_export.rows.speed import DecodeRow, LatencyRow, PrecisionRow, SpeedupRow, SpeedVerdict, StepsCompared
from mod_export.types import HasSetting, ModelKind

Row = TypeVar("Row")
Judged = tuple[PrecisionRow, ParityRow | None]
Stacks = tuple[tuple[int, ...], ...]
VERDICTS: dict[SpeedVerdict, State] = {"faster": "pass", "not faster": "fail", "inconclusive": "warn"}


def _if_known(value: Callable[[Row], float | None], text: Callable[[float], str]) -> Callable[[Row], str]:
    """Returns a cell function that formats a number; a dash if there is none."""

    def cell(row: Row) -> str:
        number = value(row)
        return "-" if number is None else text(number)

    return cell


def _verdict(row: Found) -> Cell | str:
    return "-" if row.speed is None else Cell(row.speed.verdict, state=VERDICTS[row.speed.verdict])


def _speedup(row: Found) -> str:
    return "-" if row.speed is None else interval_text(row.speed)


def _judged_speedup(row: Found) -> Cell:
    passed = row.speed.passed if isinstance(row.speed, SpeedupRow) else None
    return Cell(_speedup(row), state="" if passed is None else "pass" if passed else "fail")


def _of_whole_texts(text: Callable[[SpeedupRow], Cell | str]) -> Callable[[Found], Cell | str]:
    return lambda row: text(row.speed) if isinstance(row.speed, SpeedupRow) else "-"


def _of_model(text: Callable[[LatencyRow], str]) -> Callable[[Found], str]:
    """Returns a cell function that shows the latency of the MoD model; a dash if there is none."""

    def cell(row: Found) -> str:
        latency = row.latency("mod")
        return text(latency) if latency else "-"

    return cell


def _of_steps(text: Callable[[DecodeRow], Cell | str]) -> Callable[[Found], Cell | str]:
    return lambda row: text(row.written) if isinstance(row.written, DecodeRow) else "-"


def _of_steps_compared(text: Callable[[StepsCompared], Cell | str]) -> Callable[[Found], Cell | str]:
    return lambda row: text(row.speed) if isinstance(row.speed, StepsCompared) else "-"


def _ms(kind: ModelKind, name: str | None = None) -> Column[Found]:
    return Column(name or f"{name_of(kind)} ms", _if_known(lambda row: row.ms(kind), ms_text))


def _rate(kind: ModelKind, name: str | None = None) -> Column[Found]:
    def cell(row: DecodeRow) -> str:
        rate = row.tokens_per_second.get(kind)
        return "-" if rate is None else f"{rate:,.0f}"

    return Column(name or f"{name_of(kind)} tok/s", _of_steps(cell))


def _identical(row: Found) -> str:
    identical, compared = row.texts
    if not compared:
        return "-"
    return f"all {identical:,}" if identical == compared else f"{identical:,} of {compared:,}"


def _gate(row: SpeedupRow) -> Cell | str:
    if row.gate is None:
        return "-"
    return Cell(f"{ratio_text(row.gate)} {'pass' if row.passed else 'FAIL'}", state="pass" if row.passed else "fail")


def _control(row: SpeedupRow) -> Cell:
    low, high = row.control.ci99
    text = f"{row.control.measured:.3f}x [{low:.3f}, {high:.3f}]"
    return Cell(text) if row.control.covers_one else Cell(f"{text} not 1", state="fail")


TARGET: Column[HasSetting] = Column("target", lambda row: row.setting.target, number=False)
BUCKET: Column[HasSetting] = Column("bucket", lambda row: row.setting.bucket.name, number=False)
DTYPE: Column[HasSetting] = Column("dtype", lambda row: row.setting.dtype, number=False)
ROLE: Column[HasSetting] = Column("role", lambda row: row.setting.role, number=False)
PROMPT: Column[Found] = Column("prompt", lambda row: f"{row.setting.bucket.seq:,} tokens", number=False)
SETTING = (TARGET, BUCKET, DTYPE)
NAMED: Column[HasSetting] = Column("setting", lambda row: str(row.setting), number=False)
"""Replaces SETTING and ROLE on pages."""
TIMES = (_ms("dense"), _ms("mod"))
OUTCOME: Column[Found] = Column("parity", lambda row: judged(row.parity_passed), number=False)
SPEEDUP: Column[Found] = Column("speed-up [95 %]", _speedup)
VERDICT: Column[Found] = Column("verdict", _verdict, number=False)
PREDICTED: Column[Found] = Column(
    "predicted (FLOPs)", _of_whole_texts(_if_known(lambda row: row.predicted_flops, ratio_text))
)
EFFICIENCY: Column[Found] = Column(
    "efficiency", _of_whole_texts(_if_known(lambda row: row.efficiency, "{:.2f}".format))
)

AGREEMENT: Column[Found] = Column("routing agreement", lambda row: agreement_text(row.routing) if row.routing else "-")
ERROR: Column[Found] = Column("max error", lambda row: error_text(row.error.max_abs) if row.error else "-")
JUDGED: tuple[Column[Found], ...] = (*SETTING, OUTCOME, AGREEMENT, ERROR)
WHOLE_TEXTS: tuple[Column[Found], ...] = (
    *JUDGED,
    *TIMES,
    Column("speed-up [95 %]", _judged_speedup),
    VERDICT,
    PREDICTED,
    EFFICIENCY,
)
ALONE: tuple[Column[Found], ...] = (
    Column("ms [95 %]", _of_model(lambda row: f"{ms_text(row.p50_ms)} {ci_text(row.p50_ci95)}".rstrip())),
    Column("p90 ms", _of_model(lambda row: ms_text(row.p90_ms))),
    Column("p99 ms", _of_model(lambda row: ms_text(row.p99_ms))),
)
"""Replaces TIMES and all columns that compare them, if there is no dense baseline."""
COMPARED: tuple[Column[Found], ...] = (
    SPEEDUP,
    VERDICT,
    Column("control [99 %]", _of_whole_texts(_control)),
    PREDICTED,
    Column(
        "predicted (roofline)",
        _of_whole_texts(_if_known(lambda row: row.predicted_roofline, ratio_text)),
    ),
    EFFICIENCY,
    Column("gate", _of_whole_texts(_gate), number=False),
)
SELECTED: Column[Found] = Column("selected tokens", _of_steps(lambda row: range_text(row.selected)))
STEPS_TIMED: tuple[Column[Found], ...] = (
    SELECTED,
    _rate("dense"),
    _rate("mod"),
    SPEEDUP,
    VERDICT,
    Column("predicted (bytes)", _of_steps_compared(lambda row: ratio_text(row.predicted_bytes))),
    Column("efficiency", _of_steps_compared(lambda row: f"{row.efficiency:.2f}")),
)
STEPS_ALONE: tuple[Column[Found], ...] = (SELECTED, _ms("mod", "ms a token"), _rate("mod", "tok/s"))
"""Replaces STEPS_TIMED if there is no dense baseline."""
STEPS_JUDGED: tuple[Column[Found], ...] = (OUTCOME, Column("identical texts", _identical))
PROMPTS_TIMED: tuple[Column[Found], ...] = (*TIMES, SPEEDUP, VERDICT)
PROMPTS_ALONE: tuple[Column[Found], ...] = (_ms("mod", "ms"),)
"""Replaces PROMPTS_TIMED if there is no dense baseline."""
PROMPTS: tuple[Column[Found], ...] = (TARGET, PROMPT, DTYPE)
STACKS: Stacks = ((0, 1, 2), (3, 4, 5), (6, 7, 9), (8, 10, 11))
"""Columns that stand on top of each other on a narrow terminal: of WHOLE_TEXTS, and of SETTING, STEPS_JUDGED and
STEPS_TIMED."""
ALONE_STACKS: Stacks = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
"""Stacks of JUDGED and ALONE."""
STEPS_ALONE_STACKS: Stacks = ((0, 1, 2), (3, 4), (5, 6, 7))
"""Stacks of SETTING, STEPS_JUDGED and STEPS_ALONE."""
PROMPTS_STACKS: Stacks = ((0, 1, 2), (3,), (4, 5), (6, 7))
"""Stacks of PROMPTS, OUTCOME and PROMPTS_TIMED."""
PROMPTS_ALONE_STACKS: Stacks = ((0, 1, 2), (3,), (4,))


FAILURES: tuple[Column[FailedRow], ...] = (
    Column("what", lambda row: row.what, number=False),
    Column("stage", lambda row: row.stage, number=False),
    Column("reason", lambda row: row.reason, number=False),
)


def _quality(text: Callable[[ParityRow], Cell | str]) -> Callable[[Judged], Cell | str]:
    return lambda row: text(row[1]) if row[1] is not None and row[1].text is not None else "-"


def _gated(found: float | None, gate: float, text: Callable[[float], str]) -> Cell | str:
    """Returns a cell with a number and its gate; a dash if the output of the model is not logits."""
    return "-" if found is None else Cell(text(found), f"gate {text(gate)}")


def _errors(row: ParityRow) -> Cell:
    """Returns a cell with the errors and gates of all outputs of the model, in order."""
    outputs: list[ParityRow | OutputParity] = [row, *row.further_outputs]
    gates = ", ".join(error_text(output.allowed_max_abs) for output in outputs)
    return Cell(", ".join(error_text(output.error.max_abs) for output in outputs), f"gate {gates}")


PARITY: tuple[Column[ParityRow], ...] = (
    Column("model", lambda row: name_of(row.model), number=False),
    Column("parity", lambda row: judged(row.passed), number=False),
    Column("tokens", lambda row: Cell(f"{row.tokens:,}", f"float64 {row.rounding_tokens:,}")),
    Column("routing agreement", lambda row: agreement_text(row.routing)),
    Column("near-ties", lambda row: f"{row.routing.near_ties:,}"),
    Column("max error", _errors),
    Column("rounding error", _if_known(lambda row: row.rounding_error, error_text)),
    Column("mean error", lambda row: error_text(row.error.mean_abs)),
    Column(
        "next token",
        lambda row: _gated(row.next_token_agreement, row.gate.next_token_agreement, share_text),
    ),
    Column("KL", lambda row: _gated(row.kl, row.gate.max_kl, error_text)),
    Column(
        "perplexity",
        lambda row: (
            Cell(f"{row.text.perplexity:.4f}", f"PyTorch {row.text.reference_perplexity:.4f}") if row.text else "-"
        ),
    ),
)
PRECISION: tuple[Column[Judged], ...] = (
    Column("target", lambda row: row[0].target, number=False),
    Column("bucket", lambda row: row[0].bucket, number=False),
    Column("dtype", lambda row: row[0].dtype, number=False),
    Column("model", lambda row: name_of(row[0].model), number=False),
    Column("size", lambda row: bytes_text(row[0].bytes)),
    Column("float32 size", lambda row: bytes_text(row[0].float32_bytes)),
    Column("speed against float32 [95 %]", lambda row: interval_text(row[0])),
    Column("verdict", lambda row: Cell(row[0].verdict, state=VERDICTS[row[0].verdict]), number=False),
    Column("same next token", _quality(lambda row: share_text(row.text.next_token_agreement) if row.text else "-")),
    Column("perplexity", _quality(lambda row: f"{row.text.perplexity:.4f}" if row.text else "-")),
    Column("eager perplexity", _quality(lambda row: f"{row.text.own_perplexity:.4f}" if row.text else "-")),
    Column("parity", lambda row: judged(row[1].passed if row[1] else None), number=False),
)
PRECISION_STACKS = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9, 10), (11,))
