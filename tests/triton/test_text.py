"""Text streamed by a real Triton: the generator's text in pieces, its limits, clients that leave, and its end."""

from __future__ import annotations

import http.client
import itertools
import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from triton_server import WINDOW, Serve, TritonServer

import mod_export
from mod_export.runtime.generator import Generator

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::mod_export.errors.UnverifiedWarning"),
]
LONG = {"text": "a", "max_tokens": WINDOW - 1}
TYPES = {"text": "BYTES", "stop": "BYTES", "temperature": "FP64", "top_p": "FP64"}


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[Generator]:
    with pytest.warns(mod_export.errors.UnverifiedWarning):
        found = mod_export.load_generator(folder, threads=1)
    with found:
        yield found


def inputs_of(given: dict[str, Any]) -> list[grpc.InferInput]:
    found = []
    for name, value in given.items():
        kind = TYPES.get(name, "INT64")
        values = value if isinstance(value, list) else [value]
        dtype = {"BYTES": np.object_, "FP64": np.float64, "INT64": np.int64}[kind]
        array = np.array([key.encode() if isinstance(key, str) else key for key in values], dtype=dtype)
        found.append(grpc.InferInput(name, [len(values)], kind))
        found[-1].set_data_from_numpy(array)
    return found


def stream(client: grpc.InferenceServerClient, given: dict[str, Any]) -> queue.SimpleQueue[Any]:
    """Queue of the responses to a request."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: found.put(error or result))
    client.async_stream_infer("demo-text", inputs_of(given))
    return found


def over_grpc(server: TritonServer, given: dict[str, Any]) -> tuple[str, list[int], str]:
    text, tokens = b"", []
    with grpc.InferenceServerClient(server.grpc) as client:
        answers = stream(client, given)
        while True:
            answer = answers.get(timeout=60)
            if isinstance(answer, Exception):
                raise answer
            reason = answer.as_numpy("finish_reason")
            if reason is not None:
                assert answer.get_response().parameters["triton_final_response"].bool_param
                return text.decode(), tokens, reason[0].decode()
            text += answer.as_numpy("text")[0]
            if answer.as_numpy("token") is not None:
                tokens.append(int(answer.as_numpy("token")[0]))


def over_http(server: TritonServer, given: dict[str, Any]) -> tuple[str, list[int], str]:
    *pieces, last = server.events("demo-text", given)
    tokens = [piece["token"] for piece in pieces if "token" in piece]
    return "".join(piece["text"] for piece in pieces), tokens, last["finish_reason"]


@pytest.mark.parametrize("ask", [over_grpc, over_http])
def test_greedy_text_is_that_of_the_command(server: TritonServer, folder: Path, ask: Any) -> None:
    options = ["--max-new-tokens", "40", "--threads", "1", "--json", "-q"]
    for prompt in ("def main(", "x" * 50):
        command = [sys.executable, "-m", "mod_export", "generate", str(folder), "--prompt", prompt, *options]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        done = json.loads(lines[-1])["done"]
        found = ask(server, {"text": prompt, "max_tokens": 40})
        assert found == (done["text"], done["ids"], done["finish"])


@pytest.mark.parametrize("ask", [over_grpc, over_http])
def test_options_mean_what_they_mean_in_python(server: TritonServer, generator: Generator, ask: Any) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3}
    (completion,) = generator.generate("abc", max_new_tokens=30, **sampling)
    assert ask(server, {"text": "abc", "max_tokens": 30, **sampling}) == (completion.text, completion.ids, "length")
    (two,) = generator.generate([[7, 8, 9]], max_new_tokens=30)
    assert ask(server, {"input_ids": [7, 8, 9], "max_tokens": 30}) == (two.text, two.ids, "length")
    stop = two.text[-3:]
    (three,) = generator.generate([[7, 8, 9]], max_new_tokens=30, stop=["never", stop])
    found = ask(server, {"input_ids": [7, 8, 9], "max_tokens": 30, "stop": ["never", stop]})
    assert found == (three.text, three.ids, three.finish)


def test_texts_that_are_written_together_are_those_of_one_alone(server: TritonServer, generator: Generator) -> None:
    prompts = [f"text {number}" for number in range(9)]
    expected = [generator.generate(prompt, max_new_tokens=20)[0].ids for prompt in prompts]
    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(lambda prompt: over_http(server, {"text": prompt, "max_tokens": 20})[1], prompts))
    assert found == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 4}, "expected either text or input_ids, got neither"),
        ({"text": "a", "input_ids": [1]}, "expected either text or input_ids, got both"),
        ({"text": "a", "max_tokens": WINDOW + 1}, "longer than the window of 2048"),
        ({"text": "a", "top_p": 2.0}, "top_p: got 2.0"),
        ({"input_ids": [999]}, "token ids from 0 to 255, got 999"),
    ],
)
def test_what_cannot_be_written_is_answered_400(server: TritonServer, given: dict[str, Any], message: str) -> None:
    for way in ("generate", "generate_stream"):
        status, body = server.post(f"models/demo-text/{way}", given)
        assert (status, message in body) == (400, True), body
    with pytest.raises(grpc.InferenceServerException, match=r"expected|longer|top_p"):
        over_grpc(server, given)


def test_what_triton_itself_answers(server: TritonServer) -> None:
    """Only one response is possible at these two addresses, as docs/text.md states."""
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    assert server.post("models/demo-text/infer", {"inputs": [tensor]})[0] == 501
    status, body = server.post("models/demo-text/generate", {"text": "a", "max_tokens": 3})
    assert (status, "exactly 1 response" in body) == (200, True)


def test_the_queue_is_bounded(serve: Serve) -> None:
    with serve("--max-queue", 2) as server, ThreadPoolExecutor(30) as pool:
        request = {"text": "a", "max_tokens": 300}
        found = list(pool.map(lambda _: server.post("models/demo-text/generate_stream", request), range(30)))
    codes = [code for code, _ in found]
    assert set(codes) == {200, 503}, [body for code, body in found if code not in (200, 503)]
    assert codes.count(200) >= 5  # There are three rows, and two texts that wait.
    assert all('"finish_reason":"length"' in body for code, body in found if code == 200)
    refused = [body for code, body in found if code == 503]
    assert all("wait for a row and at most" in body or "Exceeds maximum queue size" in body for body in refused)


def leave_http(server: TritonServer) -> None:
    """Reads three pieces of a long text and closes the connection."""
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", "/v2/models/demo-text/generate_stream", json.dumps(LONG))
    answer = connection.getresponse()
    for _ in range(6):
        answer.readline()
    answer.close()
    connection.close()


def leave_grpc(server: TritonServer) -> None:
    client = grpc.InferenceServerClient(server.grpc)
    answers = stream(client, LONG)
    for _ in range(3):
        answers.get(timeout=60)
    client.stop_stream(cancel_requests=True)
    client.close()


@pytest.mark.parametrize("leave", [leave_grpc, leave_http])
def test_a_client_that_leaves_frees_its_row(server: TritonServer, leave: Any) -> None:
    with ThreadPoolExecutor(3) as pool:
        begin = time.monotonic()
        list(pool.map(lambda _: server.post("models/demo-text/generate_stream", LONG), range(3)))
        duration = time.monotonic() - begin
        list(pool.map(lambda _: leave(server), range(3)))
        begin = time.monotonic()
        status, _ = server.post("models/demo-text/generate_stream", {"text": "a", "max_tokens": 1})
    assert status == 200
    # Otherwise it would have waited for one of three whole texts.
    assert time.monotonic() - begin < duration / 3


def test_sigterm_finishes_streams(serve: Serve) -> None:
    with serve() as server:
        events = server.events("demo-text", LONG)
        begun = list(itertools.islice(events, 3))
        server.process.send_signal(signal.SIGTERM)
        *_, last = events
        assert (len(begun), last["finish_reason"]) == (3, "length")
        assert server.process.wait(60) == 0


def test_a_folder_that_cannot_be_opened_is_not_ready(serve: Serve) -> None:
    server = serve()
    repository = Path(server._command[2])
    (repository / "demo-text" / "1" / "build" / "manifest.json").unlink()
    with pytest.raises(RuntimeError, match="so this is not a build folder of mod-export"), server:
        pass
