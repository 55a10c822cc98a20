"""Answers to text requests: one that cannot be sent does not delay others. How Triton itself takes them is tested on a
real server (tests/triton).
"""

from __future__ import annotations

import queue
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mod_export
from mod_export.serve.scheduler import Scheduler
from mod_export.triton.text_model import Answers

FINAL = 1


class Sender:
    """Keeps its responses; if `broken`, it fails after the first."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.left = broken, False
        self.sent: list[Any] = []
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_cancelled(self) -> bool:
        return self.left

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.broken and self.sent:
            raise RuntimeError("the pipe is closed")
        self.sent.append(response)
        if flags == FINAL:
            self.ended.put(None)


def utils(errors: list[str]) -> Any:
    """The parts of triton_python_backend_utils that `Answers` needs; the module exists only inside Triton."""
    return SimpleNamespace(
        Tensor=lambda name, array: (name, array.tolist()[0]),
        InferenceResponse=dict,
        Logger=SimpleNamespace(log_error=errors.append),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )


def test_a_response_that_cannot_be_sent_ends_its_own_text_only(written: Path) -> None:
    errors: list[str] = []
    broken, working = Sender(broken=True), Sender()
    with (
        mod_export.load_generator(written, threads=1) as generator,
        Answers(utils(errors), shows_text=True) as answers,
        Scheduler(generator) as scheduler,
    ):
        for sender in (broken, working):
            answers.begin(scheduler, generator.texts("ab", max_new_tokens=20), sender)
        working.ended.get(timeout=60)
    assert len(broken.sent) == 1
    assert set(errors) == {"mod-export: a response cannot be sent: the pipe is closed"}
    assert working.sent[-1] == {"finish_reason": b"length"}
    assert Counter(name for response in working.sent for name in response)["token"] == 20


def test_a_text_that_nobody_reads_is_ended(written: Path) -> None:
    sender = Sender()
    sender.left = True
    with (
        mod_export.load_generator(written, threads=1) as generator,
        Answers(utils([]), shows_text=True) as answers,
        Scheduler(generator) as scheduler,
    ):
        # There is one text more than rows, so a waiting text is ended as well.
        others = [Sender() for _ in range(3)]
        for listener in [*others, sender]:
            answers.begin(scheduler, generator.texts("ab", max_new_tokens=40), listener)
        sender.ended.get(timeout=60)
        for listener in others:
            listener.ended.get(timeout=60)
    assert sender.sent[-1] in (None, {"finish_reason": b"length"})
