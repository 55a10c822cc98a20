"""A real Triton Inference Server on this machine, as a process: the one that the package nvidia-pytriton carries, which
has the Python backend only. It is installed in an environment of its own, `make triton` makes it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = Path(__file__).parents[2] / ".venv" / "triton"
SITE = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
CARRIED = SITE / "pytriton" / "tritonserver"
STUB = CARRIED / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
READY_S, STOPPED_S = 60.0, 60.0
WINDOW = 2048
"""Of the model that is served."""


def backends(folder: Path) -> Path:
    """A folder of backends: Python's, with the stub that runs models in the environment's interpreter."""
    if not STUB.exists():
        raise FileNotFoundError(f"{STUB}: there is no Triton; `make triton` installs it")
    shutil.copytree(CARRIED / "backends" / "python", folder / "python")
    shutil.copy(STUB, folder / "python")
    return folder


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return found


class TritonServer:
    """Serves a repository while its `with` block lasts.

    Attributes:
        http: host and port.
        grpc: likewise.
        process: the server.
    """

    def __init__(self, repository: Path, backend_folder: Path, log: Path) -> None:
        http, grpc, metrics = free_ports(3)
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self._log = log
        self._command = [
            CARRIED / "bin" / "tritonserver",
            *("--model-repository", repository, "--backend-directory", backend_folder),
            *("--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics),
            *("--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1", "--http-thread-count", 40),
        ]
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        libraries = [sysconfig.get_config_var("LIBDIR"), str(SITE / "nvidia_pytriton.libs")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(libraries),
            # The stub takes the first python3 that it finds.
            "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(one) for one in self._command], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOPPED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        """What it and its models have printed."""
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and body of a request."""
        request = urllib.request.Request(f"http://{self.http}/v2/{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str) -> tuple[int, str]:
        """Likewise, without a body."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def events(self, model: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The responses of /generate_stream, as they come; leaving the iterator closes the connection."""
        request = urllib.request.Request(
            f"http://{self.http}/v2/models/{model}/generate_stream", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"Triton ended with {self.process.returncode}:\n{self.log()}")
            try:
                if self.get("health/ready")[0] == 200:
                    return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.1)
        raise RuntimeError(f"Triton was not ready within {READY_S:g} s:\n{self.log()}")


Serve = Callable[..., TritonServer]
"""Makes a server of the repository that the command writes with these options."""
