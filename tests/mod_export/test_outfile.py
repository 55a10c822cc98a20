"""Files that a user names: whole or not at all, and errors that name the option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mod_export.build_folder.files import check_place, write_whole
from mod_export.errors import UsageError


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.html"
    write_whole(path, "\xe9\n")
    write_whole(path, b"\x89PNG", "--png")
    assert path.read_bytes() == b"\x89PNG"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.html"]


@pytest.mark.parametrize("option", ["--report", "--png"])
def test_errors_name_the_option(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "a"
    with pytest.raises(
        UsageError, match=rf"^{re.escape(str(tmp_path))}: is a folder; name another file with {option}$"
    ):
        check_place(tmp_path, option)
    with pytest.raises(UsageError, match=rf"a: cannot write in .*file; name another file with {option}$"):
        check_place(below, option)
    with pytest.raises(UsageError, match=rf"a: cannot be written \(.*\); name another file with {option}$"):
        write_whole(below, b"", option)
