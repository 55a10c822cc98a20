"""Documents of a file: a text file is one document, a file of JSON lines or Parquet has many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mod_models.train_config import TrainError

COLUMN = "text"
"""The field of a JSON line, and the column of a Parquet file, that holds a document."""
JSON_LINES = {".jsonl", ".ndjson"}
PARQUET = {".parquet"}


def documents_of(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of each document. In a file of many, the name ends with `#` and the document's number.

    A file whose suffix is neither of JSON lines nor of Parquet is one document, even if its bytes are not text.

    Raises:
        TrainError: a line or a table has no text, or pyarrow is not installed and the file is Parquet.
        OSError: the file cannot be read.
    """
    if path.suffix in JSON_LINES:
        yield from ((f"{name}#{number}", text.encode()) for number, text in _lines(path))
    elif path.suffix in PARQUET:
        yield from ((f"{name}#{number}", text.encode()) for number, text in enumerate(_cells(path), 1))
    else:
        yield name, path.read_bytes()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
                text = row[COLUMN]
                if not isinstance(text, str):
                    raise TypeError(f"{COLUMN!r} is {type(text).__name__}")
                text.encode()
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                expected = f'expected an object with a text in "{COLUMN}"'
                raise TrainError(f"{path}: line {number}: {expected} ({error})") from error
            yield number, text


def _cells(path: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TrainError(f"{path}: Parquet needs the package pyarrow; pip install 'mod-export[train]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            if COLUMN not in file.schema_arrow.names:
                raise TrainError(f"{path}: has the columns {', '.join(file.schema_arrow.names)}, expected {COLUMN!r}")
            for batch in file.iter_batches(columns=[COLUMN]):
                for cell in batch.column(0).to_pylist():
                    if cell is not None and not isinstance(cell, str):
                        raise TrainError(f"{path}: the column {COLUMN!r} holds {type(cell).__name__}, expected text")
                    yield cell or ""
    except (ArrowException, ValueError) as error:
        if isinstance(error, TrainError):
            raise
        raise TrainError(f"{path}: not a readable Parquet file ({error})") from error
