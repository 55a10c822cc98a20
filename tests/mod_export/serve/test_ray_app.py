"""Build folders on a real Ray Serve, started here: what clients get, and what happens to replicas.

A text of the tiny model is over in milliseconds. Where one has to last, a text of the test itself has a row of the
replica and takes its time at every token, so that all the others do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from openai import OpenAI

import mod_export

# Ray's modules warn when they are imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from ray.cluster_utils import Cluster

    from mod_export.serve.ray_app import BESIDE_TEXTS, Arguments, app

ENVIRONMENT = MappingProxyType(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's sockets have paths of their own below this, and 107 characters is all that a socket's path may have.
        "RAY_TMPDIR": "/tmp",
        # Workers run at a niceness of 15 otherwise, and beside other tests they get next to nothing.
        "RAY_worker_niceness": "0",
        # The one proxy of these tests would give all requests to the replicas of its own node.
        "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
        "RAY_SERVE_PROXY_PREFER_LOCAL_AZ_ROUTING": "0",
    }
)
NAME = "tiny"
PROMPT = [7, 3, 200, 41, 5]
ROWS, QUEUE = 3, 2
STEP_S = 0.1
PATIENCE_S = 60.0


class Application:
    """An application that runs."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def complete(self, tokens: int, **options: Any) -> Any:
        """A text of PROMPT, chosen greedily."""
        with self.client() as client:
            return client.completions.create(prompt=PROMPT, max_tokens=tokens, temperature=0, **options)

    def get(self, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str]:
        return self._answer(urllib.request.Request(self.url + path, headers=dict(headers)))[:2]

    def post(self, body: Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str, Any]:
        """Status, text and headers of a completion."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return self._answer(urllib.request.Request(f"{self.url}/v1/completions", data, headers))

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        found = re.search(rf"^mod_export_{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def replicas(self) -> list[Any]:
        """The actors of those that run."""
        named = ray.util.list_named_actors(all_namespaces=True)
        own = [one for one in named if one["name"].startswith(f"SERVE_REPLICA::{self.name}#")]
        found = []
        for one in own:
            with contextlib.suppress(ValueError):  # It has ended meanwhile.
                found.append(ray.get_actor(one["name"], namespace=one["namespace"]))
        return found

    def running(self) -> int:
        """How many replicas take requests."""
        found = serve.status().applications[self.name].deployments["mod-export"].replica_states
        return int(found.get("RUNNING", 0))

    @staticmethod
    def _answer(request: urllib.request.Request) -> tuple[int, str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
                return found.status, found.read().decode(), found.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers


class OnRay:
    """A cluster of one node that has an open port."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.cluster, self.port = cluster, port
        self._applications = 0

    @contextlib.contextmanager
    def application(self, **arguments: Any) -> Iterator[Application]:
        """Runs one under an address of its own."""
        self._applications += 1
        name = f"test{self._applications}"
        serve.run(app(Arguments(**arguments)), name=name, route_prefix=f"/{name}")
        try:
            yield Application(name, f"http://127.0.0.1:{self.port}/{name}")
        finally:
            serve.delete(name)


@pytest.fixture(scope="module")
def on_ray() -> Iterator[OnRay]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), socket.socket() as found:
        warnings.simplefilter("ignore")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        # Functions of this file run in replicas, which cannot import it.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": port},
                logging_config={"log_level": "ERROR", "enable_access_log": False},
            )
            yield OnRay(cluster, port)
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def running(on_ray: OnRay, written: Path) -> Iterator[Application]:
    """One replica."""
    with on_ray.application(folder=written, name=NAME, rows=ROWS, max_queue=QUEUE) as found:
        yield found


def until(said: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    """Waits until something is so; the seconds that it took."""
    began = time.monotonic()
    while not said():
        assert time.monotonic() < began + within_s
        time.sleep(0.05)
    return time.monotonic() - began


def inside(replica: Any, act: Callable[[Any], Any]) -> Any:
    """The result of something that is done in the process of a replica, with our part of it."""
    return ray.get(replica.__ray_call__.remote(lambda _: act(serve.get_replica_context().servable_object)))


@contextlib.contextmanager
def slow(replica: Any, folder: int = 0, step_s: float = STEP_S) -> Iterator[None]:
    """A text has one row, and lets nobody write faster than a token in so many seconds."""

    def begin(own: Any) -> None:
        own.over = threading.Event()
        writing = own.open_folders[folder].service.writing
        (text,) = writing.generator.texts([[1]], 47, ignore_eos=True)
        own.job = writing.scheduler.submit([text], lambda event: own.over.wait(step_s))

    def end(own: Any) -> None:
        own.job.cancel()
        own.over.set()

    inside(replica, begin)
    try:
        yield
    finally:
        inside(replica, end)


@contextlib.contextmanager
def asking(ask: Callable[[], Any], times: int = 1) -> Iterator[list[Any]]:
    """Several requests at once. The list has all of their answers when the block is over."""
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(ask())) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        for thread in threads:
            thread.join()


def test_texts_are_those_of_generate_and_come_piece_by_piece(running: Application, written: Path) -> None:
    with mod_export.load_generator(written, threads=1) as generator:
        (expected,) = generator.generate([PROMPT], 30)
    found = running.complete(30, model=NAME)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, expected.finish)
    assert found.usage.completion_tokens == len(expected.ids)
    # One token after the other is sent, and each when it is there.
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
def test_what_is_too_much_is_refused_by_the_application(running: Application) -> None:
    """Also when more come than Ray lets through to a replica at once."""
    (replica,) = running.replicas()
    requests = ROWS + 2 * QUEUE + 1 + BESIDE_TEXTS + 20
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
    with slow(replica):
        until(lambda: running.metric("busy_rows") == 1)
        with asking(lambda: running.post(body), requests) as answers:
            until(lambda: running.metric("queue_depth") == QUEUE and len(answers) == requests - ROWS + 1 - QUEUE)
            # Other addresses answer meanwhile.
            assert running.get("/v2/health/ready")[0] == 200
            assert running.metric("busy_rows") == ROWS
    assert Counter(status for status, _, _ in answers) == {200: ROWS - 1 + QUEUE, 429: requests - ROWS + 1 - QUEUE}
    for status, text, headers in answers:
        if status == 429:
            assert int(headers["Retry-After"]) >= 1
            assert json.loads(text)["error"]["code"] == "queue_full"
    assert running.post(body)[0] == 200


@pytest.mark.slow
def test_a_replica_that_ends_is_replaced(running: Application) -> None:
    (replica,) = running.replicas()
    before = running.complete(8, model=NAME).choices[0].text
    ray.kill(replica)
    # Ray answers what was on its way with an error; a client tries again, as those of OpenAI do by themselves.
    until(lambda: running.post({"prompt": PROMPT})[0] == 200)
    assert running.complete(8, model=NAME).choices[0].text == before


@pytest.mark.slow
def test_a_replica_that_is_not_live_is_replaced(running: Application) -> None:
    (replica,) = running.replicas()
    before = inside(replica, lambda _: os.getpid())
    inside(replica, lambda own: own.open_folders[0].service.writing.scheduler.stop())
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
        # Both answer.
        until(lambda: len(found.replicas()) == 2)
        with asking(lambda: found.post(body), 20) as answers:
            pass
        assert Counter(status for status, _, _ in answers) == {200: 20}
        assert all(inside(one, _texts) for one in found.replicas())


@pytest.mark.slow
def test_a_replica_on_each_of_two_nodes(on_ray: OnRay, written: Path) -> None:
    node = on_ray.cluster.add_node(num_cpus=2)
    try:
        # Neither node has the CPUs for both.
        with on_ray.application(folder=written, replicas=2, threads=2, rows=1, max_queue=32) as found:
            replicas = found.replicas()
            nodes = {inside(one, lambda _: ray.get_runtime_context().get_node_id()) for one in replicas}
            assert nodes == {one["NodeID"] for one in ray.nodes() if one["Alive"]}
            with asking(lambda: found.post({"prompt": PROMPT, "max_tokens": 20, "temperature": 0}), 20) as answers:
                pass
            assert Counter(status for status, _, _ in answers) == {200: 20}
            assert len({json.loads(text)["choices"][0]["text"] for _, text, _ in answers}) == 1
            assert all(inside(one, _texts) for one in replicas)
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

        # The first where none is named.
        assert [ask(name, **key)[1]["model"] for name in ("", "a", "b")] == ["a", "a", "b"]
        assert opened() == ["a", "b"]
        # What the body says has to agree.
        assert ask("b", "b", **key)[0] == 200
        status, answer = ask("b", "a", **key)
        assert (status, answer["error"]["message"]) == (404, "model 'a': not served here; this server has 'b'")
        status, answer = ask("d", **key)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert (
            answer["error"]["message"] == "model 'd': not served here; this server has 'a', 'b', 'c', 'lost', 'scores'"
        )
        # Whoever has no key has nothing opened.
        assert ask("c")[0] == 401
        assert found.get("/v2/health/live", {"serve-multiplexed-model-id": "c"})[0] == 401
        assert found.get("/v2/health/live")[0] == 200
        assert opened() == ["a", "b"]
        # A folder that is closed for another one first ends its texts.
        with slow(replica, folder=1):
            with asking(lambda: ask("b", **key)) as slower:
                until(lambda: inside(replica, lambda own: own.open_folders[1].service.writing.scheduler.busy) == 2)
                assert ask("c", **key)[1]["model"] == "c"
            ((status, answer),) = slower
            assert (status, answer["model"]) == (200, "b")
            assert opened() == ["a", "c"]
        # One that cannot be opened is no fault of the client.
        (tmp_path / "root/lost").unlink()
        status, answer = ask("lost", **key)
        assert (status, answer["error"]["message"]) == (500, "model 'lost': cannot be opened; the log says why")
        # Of whole rows: the text folders have no such address.
        status, text = found.get("/v2/models/scores", {**key, "serve-multiplexed-model-id": "scores"})
        assert (status, json.loads(text)["platform"]) == (200, "mod_export_ort-cpu")
        assert opened() == ["a", "scores"]


@pytest.mark.slow
def test_the_command_of_ray(on_ray: OnRay, written: Path) -> None:
    """As it is typed, with a folder that is named from here."""
    ran = subprocess.run(
        [
            Path(sys.executable).with_name("serve"), "run", "--address", on_ray.cluster.address, "--non-blocking",
            "--name", "typed", "--route-prefix", "/typed", "mod_export.serve.ray_app:app", f"folder={written.name}",
            "name=tiny", "rows=3", "max_queue=16", "replicas=1", "max_replicas=2", "threads=2", "hosts=a.example",
        ],
        cwd=written.parent, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    try:
        found = Application("typed", f"http://127.0.0.1:{on_ray.port}/typed")
        until(lambda: found.get("/v2/health/ready")[0] == 200)
        assert [one["id"] for one in json.loads(found.get("/v1/models")[1])["data"]] == ["tiny"]
        assert found.get("/v1/models", {"Host": "a.example"})[0] == 200
        assert found.get("/v1/models", {"Host": "b.example"})[0] == 403
        assert found.complete(8, model="tiny").choices[0].text
    finally:
        serve.delete("typed")


# Without Ray.
