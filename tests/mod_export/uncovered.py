"""The environment of a process that must not measure its coverage: one that may not write large files would leave a
damaged file of it behind, on which the sum over all processes fails.
"""

import os

__all__ = ["uncovered"]


def uncovered() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
