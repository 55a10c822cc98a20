"""Components of `make load`: arrivals, percentiles, the client, wrong requests, verdicts, and tables. The load itself
takes minutes and is no test.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.load import malformed
from benchmarks.load import run as run_load
from benchmarks.load.arrivals import early_and_late, percentile, percentiles, poisson_times, prompts, spread
from benchmarks.load.malformed import Case, cases, problem
from benchmarks.load.outcomes import HEAD, Check, Outcome, at_least, at_most, equal, holds, table, told
from benchmarks.load.raw_client import Reply, Streamed, _body, _take, read_head, request_bytes
from benchmarks.load.scenario_steady import flat
from benchmarks.load.served import Sample, ServerProcess, Setting, free_port, greedy, parse_metrics
from benchmarks.load.sustained import Answered, rate, wrong_texts

MIB = 2**20


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "no-build", tmp_path, seed=3, steady_s=60, locust=tmp_path / "locust")


def test_poisson_arrivals_come_at_their_rate_and_differ_by_seed():
    times = poisson_times(20, 200, seed=1)
    assert times == sorted(times) == poisson_times(20, 200, seed=1) != poisson_times(20, 200, seed=2)
    assert times[0] > 0
    assert times[-1] < 200
    assert len(times) == pytest.approx(4000, rel=0.1)
    between = [b - a for a, b in pairwise(times)]
    # For independent arrivals, the share of pauses longer than the mean pause is 1/e.
    assert sum(pause > 1 / 20 for pause in between) / len(between) == pytest.approx(math.exp(-1), abs=0.03)


def test_a_rate_must_be_above_zero():
    with pytest.raises(ValueError, match="expected a rate above 0 a second, got 0"):
        poisson_times(0, 10, seed=1)


def test_percentiles_are_samples():
    samples = random.Random(1).sample(range(1, 101), 100)
    assert [percentile(samples, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.01) == 7
    assert percentiles(samples) == {"samples": 100, "p50": 50, "p95": 95, "p99": 99}
    assert math.isnan(percentile([], 0.5))


def test_spread_shows_the_median_and_the_extremes():
    assert spread([3, 1, 2]) == "2.00 (1.00 to 3.00)"
    assert spread([3, 1, 2], 0) == "2 (1 to 3)"


def test_early_is_the_second_tenth_and_late_the_last():
    assert early_and_late([0, 0, 1, 1, *[5] * 14, 9, 9]) == (1, 9)
    with pytest.raises(ValueError, match="expected at least 10 samples, got 9"):
        early_and_late([1] * 9)


def test_prompts_differ_and_depend_on_the_seed_alone():
    found = prompts(20, 64, seed=1)
    assert len(set(found)) == 20
    assert {len(prompt) for prompt in found} == {64}
    assert found == prompts(20, 64, seed=1) != prompts(20, 64, seed=2)


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (at_most("a", 2, 2), "pass"),
        (at_most("a", 2.1, 2), "FAIL"),
        (at_most("a", math.nan, 2), "FAIL"),
        (at_least("a", 2, 2), "pass"),
        (at_least("a", math.nan, 2), "FAIL"),
        (equal("a", 1, 1), "pass"),
        (equal("a", None, 0), "FAIL"),
        (holds("a", False, "x", "y"), "FAIL"),
        (told("a", "x"), ""),
    ],
)
def test_verdicts(check: Check, verdict: str):
    assert check.verdict == verdict


def test_an_outcome_passes_if_all_of_it_does():
    assert not Outcome("a").passed
    assert Outcome("a", [told("x", "1"), equal("y", 1, 1)]).passed
    assert not Outcome("a", [equal("y", 1, 1), equal("z", 1, 2)]).passed


def test_the_table_has_a_row_for_each_value_whatever_stands_in_it():
    outcomes = [Outcome("a", [at_most("wait", 1234.5, 2000, " ms", 1), told("x|y", "1\n2")]), Outcome("b")]
    assert table(outcomes).splitlines() == [
        *HEAD.splitlines(),
        "| a | wait | 1,234.5 ms | at most 2,000.0 ms | pass |",
        "| a | x/y | 1 2 | - | - |",
    ]


def test_memory_that_grows_is_not_flat():
    even = [Sample(100 * MIB, 20, 7)] * 100
    assert all(check.passed for check in flat(even, even[0]))
    grown = [item._replace(rss=100 * MIB + number * MIB, descriptors=20 + number) for number, item in enumerate(even)]
    assert [check.what for check in flat(grown, even[0]) if not check.passed] == [
        "growth of RSS between these tenths", "more of them",
    ]  # fmt: skip


def answered(ended: float, status: int = 200, text: str = "a", prompt: int = 0) -> Answered:
    return Answered(ended - 1, 1.0, status, 10, text=text, prompt=prompt)


def test_rates_count_what_was_complete_in_time():
    answers = [answered(1), answered(2), answered(3), answered(3, status=429), answered(9)]
    assert rate(answers, 2, 4) == (1.0, 10.0)


def test_texts_are_held_against_the_right_one_or_the_first():
    answers = [answered(1), answered(2, text="b"), answered(3, text="b", prompt=1), answered(3, status=0, text="")]
    assert wrong_texts(answers) == 1
    assert wrong_texts(answers, {0: "b", 1: "b"}) == 1
    assert wrong_texts(answers, {0: "a", 1: "a"}) == 2


def test_metrics_are_read_with_their_labels():
    text = '# HELP a b\na 3.0\nb_total{finish="stop",x="1 2"} 1e3\nc_created 1.5e+09\n'
    assert parse_metrics(text) == {"a": 3.0, 'b_total{finish="stop",x="1 2"}': 1000.0, "c_created": 1.5e9}


def parsed(received: bytes) -> tuple[int, dict[str, str], bytes]:
    async def read() -> tuple[int, dict[str, str], bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(received)
        reader.feed_eof()
        status, headers = await read_head(reader)
        return status, headers, b"".join([piece async for piece in _body(reader, headers)])

    return asyncio.run(read())


def test_bodies_come_with_a_length_or_in_chunks():
    assert parsed(b"HTTP/1.1 429 Too Many\r\nRetry-After: 2\r\nContent-Length: 3\r\n\r\nabc") == (
        429, {"retry-after": "2", "content-length": "3"}, b"abc",
    )  # fmt: skip
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"
    assert parsed(chunks)[2] == b"abc0123456789"
    with pytest.raises(asyncio.IncompleteReadError):
        parsed(chunks[:-20])


def test_headers_of_a_request_can_be_replaced_and_left_out():
    sent = request_bytes("POST", "/x", b"{}", {"Content-Type": "", "Content-Length": "9"}).decode()
    assert sent == "POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{}"


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode()


def choice(text: str, finish: str | None = None, index: int = 0) -> list[dict[str, object]]:
    return [{"index": index, "text": text, "finish_reason": finish}]


def test_a_stream_is_whole_when_every_text_ended():
    found = Streamed(200, {})
    texts = [_take(found, event(choices=chunk)) for chunk in (choice("a"), choice("b"), choice("x", index=1))]
    assert texts == [True] * 3
    for chunk in (choice("", "length"), choice("", "stop", index=1)):
        assert not _take(found, event(choices=chunk))
    assert not found.whole
    _take(found, event(choices=[], usage={"completion_tokens": 5}))
    _take(found, b"data: [DONE]")
    assert found.whole
    assert (found.texts, found.finishes, found.tokens) == ({0: "ab", 1: "x"}, {0: "length", 1: "stop"}, 5)


def test_a_stream_with_an_error_is_not_whole():
    found = Streamed(200, {}, done=True)
    _take(found, event(error={"message": "m"}))
    assert found.error == {"message": "m"}
    assert not found.whole
    assert not replace(found, error=None, texts={0: "a"}).whole


def test_wrong_requests_come_from_the_seed_and_are_of_every_kind():
    found = cases(random.Random(7), 400, "m")
    assert found == cases(random.Random(7), 400, "m") != cases(random.Random(8), 400, "m")
    assert len({case.kind for case in found}) == 12
    for case in found:
        head = case.sent.split(b"\r\n", 1)[0]
        assert head.endswith(b" HTTP/1.1")
        assert case.path.encode() in head
    assert all(isinstance(malformed.encoded(malformed.junk(random.Random(seed))), bytes) for seed in range(200))


OPENAI = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("path", "status", "body", "said"),
    [
        ("/v1/completions", 400, json.dumps(OPENAI), ""),
        ("/v2/models/m/infer", 400, '{"error": "m"}', ""),
        ("/v1/completions", 400, '{"error": "m"}', "an error of another shape"),
        ("/v2/models/m/infer", 404, json.dumps(OPENAI), "an error of another shape"),
        ("/v1/completions", 400, '{"error": {"message": "m"}}', "an error of another shape"),
        ("/v1/completions", 400, "<html>", "a body that is no JSON"),
        ("/v1/completions", 500, json.dumps(OPENAI), "status 500"),
        ("/v1/completions", 200, "{}", "status 200"),
    ],
)
def test_answers_to_wrong_requests_are_judged(path: str, status: int, body: str, said: str):
    found = problem(Case("k", path, b"", refused=True), Reply(status, {}, body.encode(), 0.0))
    assert (said in found) if said else not found
    if status == 200:
        assert not problem(Case("k", path, b""), Reply(status, {}, body.encode(), 0.0))


def test_greedy_requests_have_a_fixed_length():
    assert greedy("a", 3, n=2) == {"prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "n": 2}


def test_a_server_that_does_not_start_says_why(setting: Setting):
    with pytest.raises(RuntimeError, match=r"(?s)the server did not start: .*no-build"), ServerProcess(setting, "none"):
        pass


def test_free_ports_are_not_taken():
    assert 0 < free_port() < 65536


def test_a_scenario_that_takes_too_long_or_fails_is_a_row(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    async def sleeps(_: Setting) -> list[Check]:
        await asyncio.sleep(10)
        return []

    async def fails(_: Setting) -> list[Check]:
        raise RuntimeError("broken")

    async def works(_: Setting) -> list[Check]:
        return [equal("x", 1, 1)]

    for name, run, limit in (("sleeps", sleeps, 0.05), ("fails", fails, 5.0), ("works", works, 5.0)):
        monkeypatch.setitem(run_load.SCENARIOS, name, run_load.Scenario(run, limit))
    late, broken, good = (run_load.run(name, setting) for name in ("sleeps", "fails", "works"))
    assert (late.passed, broken.passed, good.passed) == (False, False, True)
    assert (late.checks[0].got, late.checks[0].expected) == ("not done", "done within 0 s")
    assert broken.checks[0].got == "RuntimeError: broken"
    assert good.checks[-1].what == "cores that other programs used"


def test_scenarios_are_listed_and_named(capsys: pytest.CaptureFixture[str]):
    assert run_load.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(run_load.SCENARIOS)
    with pytest.raises(SystemExit):
        run_load.main(["--only", "steady,nonsense"])
    assert "nonsense: expected some of batching" in capsys.readouterr().err


def test_the_steady_load_says_where_locust_comes_from(setting: Setting):
    outcome = run_load.run("steady", setting)
    assert "`make load` installs it, or name it with --locust" in outcome.checks[0].got
