"""How much memory there is to use: what is free on the machine, or what is left of a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import psutil

__all__ = ["free_bytes", "limited"]

_budget: ContextVar[int] = ContextVar("budget", default=0)


@contextlib.contextmanager
def limited(budget: int) -> Iterator[None]:
    """Inside, `free_bytes` counts from `budget` bytes for this process; 0 is no limit."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def free_bytes() -> int:
    """Bytes that may still be taken."""
    free = psutil.virtual_memory().available
    budget = _budget.get()
    if not budget:
        return free
    own = psutil.Process().memory_info()
    # Pages of mapped files can be taken back at any time; where the system does not tell them apart, all count.
    used = own.rss - getattr(own, "shared", 0)
    return max(0, min(free, budget - used))
