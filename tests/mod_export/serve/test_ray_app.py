"""Build folders on a real Ray Serve: what clients get, and what happens to replicas."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_serving import (
    NAME,
    PATIENCE_S,
    PROMPT,
    STEP_S,
    Application,
    OnRay,
    asking,
    inside,
    kill_while_it_writes,
    ray,
    ray_serve,
    serve,
    slow,
    until,
)

import mod_export
from mod_export.serve.ray_app import BESIDE_TEXTS

ROWS, QUEUE = 3, 2


@pytest.fixture(scope="module")
def on_ray() -> Iterator[OnRay]:
    # Replicas run functions of this file but cannot import it.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_serve() as found:
        yield found


@pytest.fixture(scope="module")
def running(on_ray: OnRay, written: Path) -> Iterator[Application]:
    """An application with one replica."""
    with on_ray.application(folder=written, name=NAME, rows=ROWS, max_queue=QUEUE) as found:
        yield found


@pytest.mark.slow
def test_texts_are_those_of_generate_and_come_piece_by_piece(running: Application, written: Path) -> None:
    with mod_export.load_generator(written, threads=1) as generator:
        (expected,) = generator.generate([PROMPT], 30)
    found = running.complete(30, model=NAME)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, expected.finish)
    assert found.usage.completion_tokens == len(expected.ids)
    # Tokens are sent one by one, each as soon as it is written.
    (replica,) = running.replicas()
    options = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    came, text = [], ""
    with (
        slow(replica),
        running.client() as client,
        client.completions.create(model=NAME, stream=True, **options) as sent,
    ):
        for chunk in sent:
            came.append(time.monotonic())
            text += chunk.choices[0].text
    with mod_export.load_generator(written, threads=1) as generator:
        (expected,) = generator.generate([PROMPT], 6, ignore_eos=True)
    assert text == expected.text
    assert len(came) == 7
    assert came[-1] - came[0] > 4 * STEP_S


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(running: Application, stream: bool) -> None:
    (replica,) = running.replicas()
    cancelled = 'texts_total{finish="cancelled"}'
    before = running.metric(cancelled)
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    data = json.dumps(body)
    with slow(replica), socket.create_connection(running.url.split("/")[2].split(":")) as connection:
        path = f"/{running.name}/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        until(lambda: running.metric("busy_rows") == 3)
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()
        # Its texts would have taken 4 s.
        assert until(lambda: running.metric("busy_rows") == 1) < 2
        assert running.metric(cancelled) == before + 2
    until(lambda: running.metric("busy_rows") == 0)


@pytest.mark.slow
def test_what_is_too_much_is_refused(running: Application) -> None:
    """The application refuses it, and Ray does too while its proxy has too many requests to hand to the replica."""
    (replica,) = running.replicas()
    requests = ROWS + 2 * QUEUE + 1 + BESIDE_TEXTS + 20
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
    with slow(replica):
        until(lambda: running.metric("busy_rows") == 1)
        with asking(lambda: running.post(body), requests) as answers:
            until(lambda: running.metric("queue_depth") == QUEUE and len(answers) == requests - ROWS + 1 - QUEUE)
            # Meanwhile other addresses answer.
            assert running.get("/v2/health/ready")[0] == 200
            assert running.metric("busy_rows") == ROWS
    assert Counter(status for status, _, _ in answers) == {200: ROWS - 1 + QUEUE, 429: requests - ROWS + 1 - QUEUE}
    refused = [(text, headers) for status, text, headers in answers if status == 429]
    assert all(int(headers["Retry-After"]) >= 1 for _, headers in refused)
    by_application = [text for text, _ in refused if "backpressure" not in text]
    # Ray lets more requests through than the application has room for.
    assert by_application
    assert {json.loads(text)["error"]["code"] for text in by_application} == {"queue_full"}
    assert running.post(body)[0] == 200


@pytest.mark.slow
def test_a_replica_that_ends_is_replaced(running: Application) -> None:
    (replica,) = running.replicas()
    before = running.complete(8, model=NAME).choices[0].text
    ray.kill(replica)
    # Ray answers requests in progress with an error; clients try again, as OpenAI's do by themselves.
    until(lambda: running.post({"prompt": PROMPT})[0] == 200)
    assert running.complete(8, model=NAME).choices[0].text == before


@pytest.mark.slow
def test_a_replica_that_is_killed_is_replaced(running: Application) -> None:
    """With SIGKILL, as by the kernel when memory is short."""

    def kill(replica: Any) -> None:
        os.kill(inside(replica, lambda _: os.getpid()), signal.SIGKILL)

    kill_while_it_writes(running, ROWS, kill)


@pytest.mark.slow
def test_a_replica_that_is_not_live_is_replaced(running: Application) -> None:
    (replica,) = running.replicas()
    before = inside(replica, lambda _: os.getpid())
    inside(replica, lambda own: own.open_folders[0].service.writing.stop())
    assert running.post({"prompt": PROMPT})[0] == 503
    until(lambda: running.post({"prompt": PROMPT})[0] == 200)
    until(lambda: len(running.replicas()) == 1)
    (replica,) = running.replicas()
    assert inside(replica, lambda _: os.getpid()) != before


@pytest.mark.slow
def test_load_starts_a_second_replica(on_ray: OnRay, written: Path) -> None:
    scaling = {"max_replicas": 2, "upscale_delay_s": 1, "max_wait_s": 300}
    with on_ray.application(folder=written, rows=1, max_queue=32, **scaling) as found:
        (replica,) = found.replicas()
        body = {"prompt": PROMPT, "max_tokens": 2}
        with asking(lambda: found.post(body), 8) as answers, slow(replica, step_s=10):
            until(lambda: found.running() == 2)
        assert [status for status, _, _ in answers] == [200] * 8
        # Both replicas answer.
        until(lambda: len(found.replicas()) == 2)
        with asking(lambda: found.post(body), 20) as answers:
            pass
        assert Counter(status for status, _, _ in answers) == {200: 20}
        assert all(inside(one, _texts) for one in found.replicas())


@pytest.mark.slow
def test_a_replica_on_each_of_two_nodes(on_ray: OnRay, written: Path) -> None:
    node = on_ray.cluster.add_node(num_cpus=2)
    try:
        # Neither node has enough CPUs for both replicas.
        with on_ray.application(folder=written, replicas=2, threads=2, rows=1, max_queue=32) as found:
            replicas = found.replicas()
            nodes = {inside(item, lambda _: ray.get_runtime_context().get_node_id()) for item in replicas}
            assert nodes == {item["NodeID"] for item in ray.nodes() if item["Alive"]}
            with asking(lambda: found.post({"prompt": PROMPT, "max_tokens": 20, "temperature": 0}), 20) as answers:
                pass
            assert Counter(status for status, _, _ in answers) == {200: 20}
            assert len({json.loads(text)["choices"][0]["text"] for _, text, _ in answers}) == 1
            assert all(inside(item, _texts) for item in replicas)
    finally:
        on_ray.cluster.remove_node(node)


def _texts(own: Any) -> bool:
    """Whether a replica has written texts."""
    return b'mod_export_texts_total{finish="length"}' in own.open_folders[0].service.metrics.text()


@pytest.mark.slow
def test_several_folders(on_ray: OnRay, written: Path, built: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for name, folder in {"a": written, "b": written, "c": written, "lost": written, "scores": built}.items():
        (tmp_path / "root" / name).symlink_to(folder)
    (tmp_path / "keys").write_text("one key\n")
    arguments = {"folders": tmp_path / "root", "open_folders": 1, "api_key_file": tmp_path / "keys", "max_queue": 4}
    with on_ray.application(**arguments) as found:
        (replica,) = found.replicas()
        key = {"Authorization": "Bearer one key"}

        def ask(name: str, model: str | None = None, **headers: str) -> tuple[int, Any]:
            named = {"serve-multiplexed-model-id": name} if name else {}
            status, text, _ = found.post({"prompt": PROMPT, "max_tokens": 3, "model": model}, {**named, **headers})
            return status, json.loads(text)

        def opened() -> list[str]:
            return list(inside(replica, lambda own: [one.service.name for one in own.open_folders if not one.closed]))

        # Without a name, the first folder answers.
        assert [ask(name, **key)[1]["model"] for name in ("", "a", "b")] == ["a", "a", "b"]
        assert opened() == ["a", "b"]
        # A name in the body must agree.
        assert ask("b", "b", **key)[0] == 200
        status, answer = ask("b", "a", **key)
        assert (status, answer["error"]["message"]) == (404, "model 'a': not served here; this server has 'b'")
        status, answer = ask("d", **key)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert (
            answer["error"]["message"] == "model 'd': not served here; this server has 'a', 'b', 'c', 'lost', 'scores'"
        )
        # Without a key, a client opens no folder.
        assert ask("c")[0] == 401
        assert found.get("/v2/health/live", {"serve-multiplexed-model-id": "c"})[0] == 401
        assert found.get("/v2/health/live")[0] == 200
        assert opened() == ["a", "b"]
        # Before a folder is closed for another one, its texts end.
        with slow(replica, folder=1):
            with asking(lambda: ask("b", **key)) as slower:
                until(lambda: inside(replica, lambda own: own.open_folders[1].service.writing.busy) == 2)
                assert ask("c", **key)[1]["model"] == "c"
            ((status, answer),) = slower
            assert (status, answer["model"]) == (200, "b")
            assert opened() == ["a", "c"]
        # If a folder cannot be opened, it is not the client's fault.
        (tmp_path / "root/lost").unlink()
        status, answer = ask("lost", **key)
        assert (status, answer["error"]["message"]) == (500, "model 'lost': cannot be opened; the log says why")
        # This address exists for folders of whole rows; text folders do not have it.
        status, text = found.get("/v2/models/scores", {**key, "serve-multiplexed-model-id": "scores"})
        assert (status, json.loads(text)["platform"]) == (200, "mod_export_ort-cpu")
        assert opened() == ["a", "scores"]


@pytest.mark.slow
def test_the_command_of_ray(on_ray: OnRay, written: Path) -> None:
    """Runs the command as typed, with a relative folder."""
    process = subprocess.run(
        [
            Path(sys.executable).with_name("serve"), "run", "--address", on_ray.cluster.address, "--non-blocking",
            "--name", "typed", "--route-prefix", "/typed", "mod_export.serve.ray_app:app", f"folder={written.name}",
            "name=tiny", "rows=3", "max_queue=16", "replicas=1", "max_replicas=2", "threads=2", "hosts=a.example",
        ],
        cwd=written.parent, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    try:
        found = Application("typed", f"http://127.0.0.1:{on_ray.port}/typed")
        until(lambda: found.get("/v2/health/ready")[0] == 200)
        assert [model["id"] for model in json.loads(found.get("/v1/models")[1])["data"]] == ["tiny"]
        assert found.get("/v1/models", {"Host": "a.example"})[0] == 200
        assert found.get("/v1/models", {"Host": "b.example"})[0] == 403
        assert found.complete(8, model="tiny").choices[0].text
    finally:
        serve.delete("typed")
