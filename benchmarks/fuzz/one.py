"""Fuzzes one reader in this process: `python -m benchmarks.fuzz.one NAME [libFuzzer's arguments]`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mod_export", "mod_models"]):
    from benchmarks.fuzz.readers import read


def main() -> None:
    name = sys.argv.pop(1)
    folder = Path(tempfile.mkdtemp(prefix="mod-export-fuzz-"))

    def test(content: bytes) -> None:
        try:
            read(name, content, folder)
        finally:
            for path in folder.iterdir():
                path.unlink()

    try:
        atheris.Setup(sys.argv, test)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
