"""Work of a supervised process that ends before it serves. New processes import this file, so it imports little."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable


def crash(path: str, restarts: int, say: Callable[[str], None]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def cut_an_event(path: str, restarts: int, say: Callable[[str], None]) -> int:
    """Answers one request with two events and the beginning of a third one, in two parts, and ends."""
    parts = (b'data: {"a": 1}\n\ndata: {"b"', b': 2}\n\ndata: {"c')
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        say("two events")
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
    return crash(path, restarts, say)


def leave(path: str, restarts: int, say: Callable[[str], None]) -> int:
    return 7
