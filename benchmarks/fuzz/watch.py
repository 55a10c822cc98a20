"""Lets a reader read cases while Python's audit events are watched: `python -m benchmarks.fuzz.watch NAME COUNT SEED`.

Prints one line of JSON: how many cases were not refused, the seconds of the slowest, and the problems. An event is a
problem if a file outside the case's folder is written or removed, the file outside that cases name is opened, a process
is started, or a connection is made (https://docs.python.org/3/library/audit_events.html).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.fuzz.cases import OUTSIDE, case
from benchmarks.fuzz.readers import inputs_of, read

SLOW_S = 10.0
MOST_BYTES = 1 << 30
STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes events that no reader may cause. A hook cannot be removed, so it is switched on and off.

    Attributes:
        seen: the events of the current case.
    """

    def __init__(self, root: Path) -> None:
        self.seen: list[str] = []
        self._inside, self._outside = str(root / "case"), str(root / OUTSIDE)
        self._on = False
        sys.addaudithook(self._hook)

    def __enter__(self) -> Watch:
        self.seen, self._on = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in STARTS:
            self.seen.append(f"{event}: {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, writes = self._path(arguments[0]), bool(arguments[2] & WRITING)
            if path.startswith(self._outside) or (writes and not self._may_write(path)):
                self.seen.append(f"open {path}")
        elif event in CHANGES and isinstance(arguments[0], str | bytes):
            path = self._path(arguments[0])
            if not self._may_write(path):
                self.seen.append(f"{event} {path}")

    def _path(self, path: str | bytes) -> str:
        return os.path.realpath(os.fsdecode(path))

    def _may_write(self, path: str) -> bool:
        return path.startswith(self._inside) or path == os.devnull


def main() -> None:
    name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    root = Path(tempfile.mkdtemp(prefix="mod-export-cases-")).resolve()
    folder = root / "case"
    (root / OUTSIDE).mkdir()
    (root / OUTSIDE / "secret").write_text("{}", encoding="utf-8")
    folder.mkdir()
    sys.dont_write_bytecode = True
    problems: list[tuple[int, str]] = []
    taken, slowest = 0, 0.0
    try:
        for path in inputs_of(name):  # Whatever is imported late is imported now.
            read(name, path.read_bytes(), folder)
            empty(folder)
        watch = Watch(root)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, resource.RLIM_INFINITY))
        for number in range(count):
            content = case(name, number, seed)
            begin = time.perf_counter()
            try:
                with watch:
                    taken += read(name, content, folder)
            except Exception as error:  # Whatever it is, it is a finding.
                problems.append((number, f"{type(error).__name__}: {str(error)[:300]}"))
            problems += [(number, event) for event in watch.seen]
            seconds = time.perf_counter() - begin
            slowest = max(slowest, seconds)
            if seconds > SLOW_S:
                problems.append((number, f"took {seconds:.1f} s"))
            empty(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"taken": taken, "slowest_s": slowest, "problems": problems}))


def empty(folder: Path) -> None:
    """Removes all files of a folder."""
    for path in folder.iterdir():
        path.unlink()


if __name__ == "__main__":
    main()
