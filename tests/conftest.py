"""Every test runs on one thread and starts from the same seed, so that a failure can be reproduced.

The marker `slow` says which tests `make test` leaves out, and `fast("a", "b")` that it leaves out all cases of a test
but these. `--commit HASH` draws a third of the slow tests that are marked `drawn`, and `--slice` one of five parts of
the collected tests. Tests marked `real` need a model from outside the project and run only with `--real-model FILE`.
Tests marked `triton` need a Triton server and run only with `-m triton`, those marked `clients` need programs of
another environment and run only with `-m clients`.
"""

from __future__ import annotations

import gc

import hypothesis
import pytest
import torch

from mod_export.graph.capture import ALLOCATIONS

pytest_plugins = ["pytester"]
SLICES = 5
"""Number of parts that `--slice` divides tests into. One part of the slow tests takes about 5 minutes on two cores."""
THIRDS = 3
SLOWEST_FOLDER = "writing_folder"
"""The shared build that takes longest. Test files that need it come first, so the worker that begins in the middle of
the tests seldom waits for it."""

# A busy machine must not fail a test: neither a time limit of an example, nor one of making examples.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _torch_seed_and_threads() -> None:
    torch.manual_seed(0)
    # Engines of AOTInductor set the number for the whole process. The threads of several processes would fight.
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    drawing = "hash of the commit, which draws a third of the slow tests that are marked `drawn`, and the slice"
    parser.addoption("--commit", metavar="HASH", type=lambda text: int(text, 16), help=drawing)
    parser.addoption("--slice", action="store_true", help=f"run only one of {SLICES} equal parts; needs --commit")
    parser.addoption("--real-model", metavar="FILE.gguf", help="run the tests that need this model, and no others")
    parser.addoption("--real-text", metavar="FILE", help="English text for them; default: the project's own pages")


CASES = pytest.StashKey[dict[str, set[str]]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the cases as slow that a `fast` marker does not name."""
    fast = item.get_closest_marker("fast")
    if fast is None:
        return
    callspec = getattr(item, "callspec", None)  # A test without cases has none.
    case = callspec.id if callspec else ""
    missing = item.config.stash.setdefault(CASES, {}).setdefault(item.nodeid.partition("[")[0], set(fast.args))
    missing.discard(case)
    if case not in fast.args:
        item.add_marker("slow")


# This hook runs last, after markers and names have deselected tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With `::` or `--lf`, only some cases are collected.
    if not any("::" in argument for argument in config.args) and not config.getoption("lf", default=False):
        unknown = {test: cases for test, cases in config.stash.get(CASES, {}).items() if cases}
        if unknown:
            raise pytest.UsageError(f"cases that are marked as fast and do not exist: {unknown}")
    real = config.getoption("--real-model") is not None
    _keep(config, items, {item.nodeid for item in items if (item.get_closest_marker("real") is not None) == real})
    for marker in ("triton", "clients"):
        wanted = config.getoption("markexpr") == marker
        _keep(config, items, {item.nodeid for item in items if (item.get_closest_marker(marker) is not None) == wanted})
    waiting = {item.path for item in items if SLOWEST_FOLDER in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in waiting)
    commit: int | None = config.getoption("--commit")
    if commit is not None:
        many = sorted(item.nodeid for item in items if {"drawn", "slow"} <= {mark.name for mark in item.iter_markers()})
        # Other digits than those of the slice, so that every test is in the slice of some commit.
        left_out = set(many).difference(many[(commit >> 16) % THIRDS :: THIRDS])
        _keep(config, items, {item.nodeid for item in items} - left_out)
    if not config.getoption("--slice"):
        return
    if commit is None:
        raise pytest.UsageError("--slice needs --commit, which draws the slice")
    # Tests are dealt out in the order of their names, because neighbours take about equally long.
    drawn = set(sorted(item.nodeid for item in items)[commit % SLICES :: SLICES])
    _keep(config, items, drawn)


def pytest_collection_finish() -> None:
    # The modules of all tests stay until the end, and Python would look through them again and again for cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[str]) -> None:
    if dropped := [item for item in items if item.nodeid not in kept]:
        config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item.nodeid in kept]
