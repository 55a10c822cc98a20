"""The public Python API breaks only with a line in the changelog. `public_api.txt` has that of the last release."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

import pytest
from api_stubs import FROZEN, HEAD, ROOT, breakages, public_api

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
FROZEN_API = FROZEN.read_text(encoding="utf-8")
ADVICE = (
    "The public API has changed in a way that breaks programs. Keep the old form for another release, with a warning "
    "(docs/releases.md, deprecation); or, if it must go now, name it in backticks in the changelog under `Unreleased`, "
    "with what users have to change"
)


def unreleased(changelog: str) -> str:
    """Returns the section of what is not released yet; empty if there is none."""
    return re.split(r"^## ", changelog.partition("\n## Unreleased\n")[2], flags=re.MULTILINE)[0]


def unannounced(found: Iterable[tuple[str, str, str]], changelog: str) -> list[str]:
    """Returns the changes whose names the section does not have between backticks."""
    quoted = re.findall(r"`([^`]+)`", unreleased(changelog))
    return [
        f"{module}.{name}: {how}"
        for name, module, how in found
        if not any(re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", text) for text in quoted)
    ]


@pytest.fixture(scope="module")
def current() -> str:
    return public_api()


def test_nothing_breaks_without_a_line_in_the_changelog(current: str) -> None:
    broken = unannounced(breakages(FROZEN_API, current), CHANGELOG)
    assert broken == [], f"{ADVICE}:\n" + "\n".join(broken)


def test_the_list_is_that_of_the_last_release(current: str) -> None:
    released = re.search(r"^## (\d\S*)", CHANGELOG, re.MULTILINE)
    assert released is not None
    assert FROZEN_API.startswith(f"{HEAD}{released[1]}, "), "the list is of another release: make api"
    if not unreleased(CHANGELOG):
        version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        assert released[1] == version, "the changelog has no section for this version"
        assert current == FROZEN_API, "this is a release, and its API is not in the list: make api"


BEFORE = """
# module mod_export
class Deployment:
    def run(self, ids, lengths=None) -> int: ...
    threads = ...
def load(root, target=None) -> Deployment: ...
def gone() -> int: ...

# module mod_export.old
Name = ...
"""
CHANGES = {
    "lengths=None": ("lengths", "mod_export.Deployment.run: Parameter is now required: lengths"),
    "ids, lengths": ("lengths, ids", "mod_export.Deployment.run: Positional parameter was moved: ids"),
    "    threads = ...\n": ("", "mod_export.Deployment.threads: Public object was removed: threads"),
    "def gone() -> int: ...\n": ("", "mod_export.gone: Public object was removed: gone"),
    "target=None": ("goal=None", "mod_export.load: Parameter was removed: target"),
    "\n# module mod_export.old\nName = ...\n": ("\n", "mod_export.old.old: the module is no longer public"),
    "class Deployment:": ("class Deployment(Base):", ""),
    "root, target=None": ("root, target=None, dtype=None", ""),
    "def gone() -> int: ...": ("def gone() -> int: ...\ndef added(): ...", ""),
}
"""What is replaced in BEFORE -> by what, and what that breaks; nothing if it is empty."""


@pytest.mark.parametrize("old", CHANGES)
def test_what_breaks_and_what_does_not(old: str) -> None:
    new, broken = CHANGES[old]
    found = list(breakages(BEFORE, BEFORE.replace(old, new)))
    lines = unannounced(found, "\n## Unreleased\n\nnothing")
    assert (broken in lines) if broken else (lines == [])
    for name, *_ in found:
        known = f"# Changelog\n\n## Unreleased\n\n* `{name}` is another.\n\n## 0.2.0\n"
        assert unannounced([one for one in found if one[0] == name], known) == []
        assert unannounced(found, known.replace("Unreleased", "0.3.0")) == lines
