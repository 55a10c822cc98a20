"""The log of a run and its printed lines."""

import io
import math
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import rows

from mod_models.train import TrainError
from mod_models.train.log import Event, Log, show

METRICS = {"predictor_loss": 0.5}
HELD_OUT = {"bits_per_byte": 2.5, "next_token_loss": 1.5, "predictor_loss": 0.25}


def test_rows(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    log.write(1, {"total_loss": 1 / 3}, METRICS)
    log.write(2, {"total_loss": math.nan}, METRICS, HELD_OUT)
    log.close()
    first, second = rows(tmp_path)
    held_out = ["held_out_bits_per_byte", "held_out_next_token_loss", "held_out_predictor_loss"]
    assert list(first) == ["step", "total_loss", "predictor_loss", *held_out]
    assert list(first.values()) == ["1", repr(1 / 3), "0.5", "", "", ""]
    assert list(second.values()) == ["2", "nan", "0.5", "2.5", "1.5", "0.25"]


def test_goes_on_after_the_step_that_was_saved(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    for step in range(1, 5):
        log.write(step, {"total_loss": float(step)}, METRICS)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("5,5.")  # The run was killed while it wrote.
    log = Log(tmp_path, 3)
    log.write(4, {"total_loss": 40.0}, METRICS, HELD_OUT)
    assert [row["total_loss"] for row in rows(tmp_path)] == ["1.0", "2.0", "3.0", "40.0"]
    # A new run deletes the rows of a run that saved nothing.
    Log(tmp_path, 0).write(1, {"other_loss": 2.0}, {})
    assert rows(tmp_path) == [
        {"step": "1", "other_loss": "2.0", "held_out_bits_per_byte": "", "held_out_next_token_loss": ""}
    ]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_the_same_and_no_step_twice(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, "tensorboard")
    for step in range(1, 5):
        log.write(step, {"total_loss": float(step)}, METRICS)
    log.close()
    log = Log(tmp_path, 2, "tensorboard")
    log.write(3, {"total_loss": 30.0}, METRICS, HELD_OUT)
    log.close()
    found = scalars(tmp_path)
    assert found["total_loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert found["held_out_bits_per_byte"] == [(3, 2.5)]
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    expected = r"^--log tensorboard: needs the package tensorboard; pip install 'mod-export\[train\]'$"
    with pytest.raises(TrainError, match=expected):
        Log(tmp_path, 0, "tensorboard")


EVENTS = [
    Event(0, 3, "resumed"),
    Event(1, 3),
    Event(2, 3, "step 2/3  loss [bold] 1 bits/byte  0 min left", "loss 1 bits/byte"),
    Event(3, 3, "held out: {}"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_or_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show(iter(EVENTS))
    assert capsys.readouterr() == ("resumed\nstep 2/3  loss [bold] 1 bits/byte  0 min left\nheld out: {}\n", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    show(iter(EVENTS))
    assert capsys.readouterr().out == ""
    text = screen.getvalue()
    assert all(part in text for part in ("resumed", "held out: {}", "3/3", "loss 1 bits/byte"))
    assert "min left" not in text
