"""Every entry of the corpus routes tokens. Each commit builds a third of them; `make corpus` builds them all."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.corpus import run as run_corpus
from benchmarks.corpus import worker as corpus_worker
from benchmarks.corpus.entry import ROWS, Entry, eager, routed_calls
from benchmarks.corpus.routers import tokens_of
from benchmarks.corpus.run import as_expected, main, read
from benchmarks.corpus.table import ENTRIES
from benchmarks.corpus.tokens import at_tokens
from benchmarks.corpus.work import LARGEST_ERROR, TARGETS, Row, described, relative_error
from benchmarks.corpus.worker import run_apart, stop

# Packages warn about themselves and each other.
pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = "torch.nn.TransformerEncoderLayer"
FAST = {
    (field, getattr(entry, field)): name
    for field in ("package", "manner", "dim", "handed_on")
    for name, entry in ENTRIES.items()
}
"""An entry of every package, with every manner of routing, and of every form of a block's arguments."""


@pytest.mark.fast(*FAST.values())
@pytest.mark.parametrize("name", ENTRIES)
def test_every_router_gives_its_block_k_tokens(name: str) -> None:
    entry = ENTRIES[name]
    model, inputs = entry.build(), entry.inputs(ROWS, entry.tokens)
    calls = routed_calls(model, inputs)
    assert calls
    assert all(given == tokens_of(seq) < seq for seq, given in calls)
    assert entry.tokens in {seq for seq, _ in calls}
    outputs = eager(model, inputs)
    assert any(output.std() > 0 for output in outputs)
    # Two builds must compute the same, or nothing could be compared with them.
    for first, second in zip(outputs, eager(entry.build(), inputs), strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_corpus_is_as_wide_as_it_says() -> None:
    assert len({(entry.package, entry.of) for entry in ENTRIES.values()}) >= 80
    assert {entry.package for entry in ENTRIES.values()} >= {"transformers", "diffusers", "x-transformers", "torch"}
    manners = Counter(entry.manner for entry in ENTRIES.values())
    assert len(manners) >= 7
    assert {manner.around for manner in manners} == {"block", "part", "attention"}
    assert len(ENTRIES) == len({entry.name for entry in ENTRIES.values()})


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_built_for_onnx_runtime_and_computes_what_eager_does(name: str) -> None:
    (row,) = run_apart(ENTRIES[name], ["ort-cpu"])
    assert as_expected(ENTRIES[name], row), row


def test_arguments_at_the_selected_tokens() -> None:
    index_BK = torch.tensor([[0, 2], [1, 3]])
    B, S = 2, 4
    mask = torch.arange(S * S).reshape(1, 1, S, S)
    given = {"mask": mask, "tables": (torch.arange(S).reshape(1, S, 1), torch.arange(S)), "other": torch.zeros(B, 5)}
    found = at_tokens(given, index_BK, S)
    assert found["mask"].tolist() == [[[[0, 2], [8, 10]]], [[[5, 7], [13, 15]]]]
    assert [table.squeeze().tolist() for table in found["tables"]] == [[[0, 2], [1, 3]]] * 2
    assert found["other"] is not None
    assert found["other"].shape == (B, 5)
    rows = at_tokens(mask, index_BK, S, (-2,))
    assert rows.tolist() == [[[[0, 1, 2, 3], [8, 9, 10, 11]]], [[[4, 5, 6, 7], [12, 13, 14, 15]]]]
    by_heads = torch.arange(3 * B * S).reshape(3 * B, 1, S)
    assert at_tokens(by_heads, index_BK, S)[:, 0].tolist() == [[0, 2], [4, 6], [8, 10], [13, 15], [17, 19], [21, 23]]


def test_how_far_an_output_is_from_eager() -> None:
    expected = np.array([3.0, -3.0, np.inf])
    assert relative_error(np.array([3.0, -3.3, np.inf]), expected) == pytest.approx(0.1)
    assert relative_error(np.array([3.0, np.nan, np.inf]), expected) == np.inf
    assert relative_error(np.array([3.0, -3.0, -np.inf]), expected) == np.inf
    assert relative_error(np.array([np.nan]), np.array([np.inf])) == np.inf


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, tuple[str, ...]]] = []

    def quick(entry: Entry, targets: list[str], seconds: float) -> list[Row]:
        begun.append((entry.name, tuple(targets)))
        wrong = {
            "status": "fail",
            "sentence": f"{Path(__file__).parents[2]}/x.py:1 of /a/corpus-x1/corpus-y2/build/b is wrong",
        }
        return [_row(entry, target, **(wrong if entry.of == "nn.LSTM" else {})) for target in targets]

    # Only the slow part is replaced: the process of one entry, which the tests below run.
    monkeypatch.setattr(run_corpus, "run_apart", quick)
    options = ["--results", str(tmp_path / "results"), "--docs", str(tmp_path), "--only", "nn.LSTM", "nn.GRU"]
    assert main([*options, "--targets", "ort-cpu"]) == 1
    lines = tmp_path / "results" / "results.jsonl"
    lines.write_text(lines.read_text() + '{"name": "torch.nn.GRU", "tar')
    assert main(options) == 1
    rest = tuple(target for target in TARGETS if target != "ort-cpu")
    assert begun == [(name, targets) for targets in (("ort-cpu",), rest) for name in ("torch.nn.LSTM", "torch.nn.GRU")]
    del begun[:]
    assert main([*options, "--failed"]) == 1
    assert begun == [("torch.nn.LSTM", TARGETS)]
    assert len(read(lines)) == 2 * len(TARGETS)
    page = (tmp_path / "corpus.md").read_text()
    assert "| nn.GRU |  | Paper | 1.0e-06 | 1.0e-06 | 1.0e-06 | built |" in page
    assert "| nn.LSTM |  | Apart | **fail** | **fail** | **fail** | **fail** |" in page
    assert f"**torch.nn.LSTM** ({', '.join(TARGETS)}):\n\n    x.py:1 of build/b is wrong\n" in page
    assert f"## torch {version('torch')}\n" in page


def _row(entry: Entry, target: str, **found: object) -> Row:
    passed = {"status": "pass", "sentence": "", "seconds": 1.0, "max_error": 1e-6}
    return described(entry, target) | passed | found


def test_what_no_entry_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing like it", "or it"])
    assert "no entry has nothing like it or or it in its name" in capsys.readouterr().err


def test_what_a_refused_entry_must_say() -> None:
    entry = ENTRIES[SMALL]
    assert as_expected(entry, _row(entry, "ort-cpu"))
    assert not as_expected(entry, _row(entry, "ort-cpu", status="refused"))
    refused = replace(entry, refused="a mask picks tokens")
    assert not as_expected(refused, _row(entry, "ort-cpu"))
    assert not as_expected(refused, _row(entry, "ort-cpu", status="refused", sentence="something else"))
    assert as_expected(refused, _row(entry, "ort-cpu", status="refused", sentence="here a mask picks tokens"))


@pytest.mark.slow
def test_an_entry_in_a_process_of_its_own() -> None:
    (row,) = run_apart(ENTRIES[SMALL], ["ort-cpu"])
    assert row["status"] == "pass", row
    assert row["routed"] == row["sites"] == 1
    assert 0 < row["max_error"] <= LARGEST_ERROR
    assert json.loads(json.dumps(row)) == row


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_stopped_and_each_target_tried_alone() -> None:
    rows = run_apart(ENTRIES[SMALL], ["ort-cpu", "openvino"], seconds=0.2)
    assert [row["target"] for row in rows] == ["ort-cpu", "openvino"]
    assert {row["status"] for row in rows} == {"error"}
    assert all(row["sentence"].startswith("stopped after 0.2 s") for row in rows)


def replace_work(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes processes run this line in place of an entry, after they have logged `before`."""
    head = "import os, sys, time\nfrom pathlib import Path\n"
    body = f"    os.setsid()\n    (Path(scratch) / 'log.txt').write_text('before')\n    {line}\n"
    (folder / "ending.py").write_text(f"{head}def work(name, targets, scratch):\n{body}")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(corpus_worker, "work", importlib.import_module("ending").work)


# The first process waits until the fork server has imported what entries need.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("os.abort()", "signal SIGABRT: before"),
        ("sys.exit(3)", "exit 3: before"),
        ("time.sleep(600)", "stopped after 10 s: before"),
    ],
)
def test_a_process_that_leaves_no_rows(line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work(line, tmp_path, monkeypatch)
    (row,) = run_apart(ENTRIES[SMALL], ["ort-cpu"], seconds=10)
    assert (row["name"], row["status"], row["sentence"]) == (SMALL, "error", reason)


@pytest.mark.slow
def test_a_run_that_is_stopped_stops_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_work("time.sleep(600)", tmp_path, monkeypatch)
    monkeypatch.setattr(corpus_worker, "_stopping", threading.Event())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_apart, ENTRIES[SMALL], list(TARGETS))
        while not multiprocessing.active_children():
            time.sleep(0.01)
        stop()
        (row,) = waiting.result()
    assert row["sentence"].startswith("signal SIGKILL")
