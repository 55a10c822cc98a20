"""Files are written whole or not at all, their errors name the option, and they are compared with what was written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mod_export.errors import BuildFolderError, UsageError
from mod_export.folder.files import FileEntry, check_place, verify_files, write_whole


def test_what_is_written_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.html"
    write_whole(path, "\xe9\n")
    write_whole(path, b"\x89PNG", "--html")
    assert path.read_bytes() == b"\x89PNG"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.html"]


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_errors_name_the_option(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "a"
    with pytest.raises(
        UsageError, match=rf"^{re.escape(str(tmp_path))}: is a folder; choose another place with {option}$"
    ):
        check_place(tmp_path, option)
    with pytest.raises(UsageError, match=rf"a: cannot write in .*file; choose another place with {option}$"):
        check_place(below, option)
    with pytest.raises(UsageError, match=rf"a: cannot be written \(.*\); choose another place with {option}$"):
        write_whole(below, b"", option)


def test_files_of_another_size_are_found_without_reading_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("four")
    verify_files(tmp_path, {"a": FileEntry(bytes=4, sha256="never asked for")}, read=False)
    message = r"a has 4 bytes, 5 were written; b is missing or not a regular file\. Build"
    with pytest.raises(BuildFolderError, match=message):
        verify_files(tmp_path, {"a": FileEntry(bytes=5, sha256=""), "b": FileEntry(bytes=1, sha256="")}, read=False)
