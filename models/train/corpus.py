"""Training text as tokens: the standard library of the running Python, or any folder or file of text.

Nothing is downloaded. A text file is one document, a file of JSON lines or Parquet has many. A hash of the document's
name (the path of the file, and a number in a file of many documents) decides its split, train or held-out. So the split
is the same on every machine and does not depend on other documents.

Documents are packed into one stream of tokens with an end-of-text token between them, and rows are cut anywhere. A row
can hold parts of two documents. Attention sees across the boundary, as in the pre-training of most models; only the
end-of-text token marks the boundary.

Tokens are bytes, which need no other file, or come from the vocabulary of a `tokenizers` file. Models with different
vocabularies are compared in bits per byte, so the number of text bytes is stored for every token. The sum of these
numbers is the length of the text, even if the tokenizer joins, splits or drops characters.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mod_models.train import TrainError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
TOKENIZER = "tokenizer.json"
COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
"""Files beside a tokenizer.json that configure its use."""
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
"""Names of the token that ends a document. The first one in the vocabulary separates documents. `</s>` is the last,
because Gemma, which ends documents with `<eos>`, has it as a tag of HTML.
"""
PIECE = 2**20
"""Approximate bytes for one call of the tokenizer, whose result takes about 100 times the memory of its ids."""
COLUMN = "text"
"""The field of a JSON line, and the column of a Parquet file, that holds a document."""
JSON_LINES = {".jsonl", ".ndjson"}
PARQUET = {".parquet"}
HELD_OUT_SHARE = 0.05
SOURCES = "this Python's sources"
SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class TokenizedText(NamedTuple):
    """A text as tokens.

    Attributes:
        id_N: uint8 (bytes) or int32 (N,), token ids.
        size_N: int32 (N,), the number of text bytes that each token stands for; None if every token is one byte.
    """

    id_N: Tensor
    size_N: Tensor | None


def as_bytes(documents: Sequence[bytes]) -> TokenizedText:
    """Joins the documents with a zero byte between them, and makes each byte a token."""
    text = bytearray(b"\0".join(documents))
    return TokenizedText(torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8), None)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json of the package `tokenizers`; documents of any length keep all of their tokens.

    Raises:
        TrainError: the package is missing, or the file is missing or is not a tokenizer.json.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TrainError("--tokenizer: needs the package tokenizers; pip install 'mod-export[train]'") from error
    if not path.is_file():
        raise TrainError(f"{path}: no such file, expected a tokenizer.json of the package tokenizers")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises nothing narrower
        raise TrainError(f"{path}: not a tokenizer.json of the package tokenizers ({error})") from error
    # Truncation and padding, if stored in the file, would silently change the text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_beside(checkpoint: Path) -> Path | None:
    """Returns the tokenizer.json in the folder of a checkpoint, which is that folder or a file in it, such as the
    model.pt of an earlier run; None if there is none.
    """
    beside = (checkpoint.parent if checkpoint.is_file() else checkpoint) / TOKENIZER
    return beside if beside.is_file() else None


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The smallest vocabulary size of a model that can read every id: the largest id + 1, since ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def keep_tokenizer(path: Path, folder: Path) -> None:
    """Copies a tokenizer and the files that configure it into the folder of a model, where a build finds them."""
    for source in (path, *(path.parent / name for name in COMPANIONS)):
        target = folder / (TOKENIZER if source == path else source.name)
        if source.is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source, target)


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id of the token between two documents; None if the vocabulary has none, and a zero byte separates them."""
    ids = (tokenizer.token_to_id(name) for name in END_OF_TEXT)
    return next((token for token in ids if token is not None), None)


def tokenize(documents: Sequence[bytes], tokenizer: Tokenizer) -> TokenizedText:
    """Tokenizes UTF-8 documents, with `end_of_text` between two; no other special tokens are added.

    Every separator counts as one byte, so that the text has the same length for all vocabularies.

    Raises:
        TrainError: the tokenizer refuses the text, for example because it has no token for unknown characters.
    """
    separator = end_of_text(tokenizer)
    ids: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    dropped = 0
    for text in _pieces(_separated(documents, zeros=separator is None)):
        if text is None:
            ids.append(np.array([separator], dtype=np.int32))
            sizes.append(np.array([1 + dropped], dtype=np.int32))
            dropped = 0
            continue
        try:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the Rust side raises nothing narrower
            raise TrainError(f"the tokenizer cannot read this text ({error})") from error
        end_C = _byte_ends(text)
        if not encoding.ids:
            dropped += int(end_C[-1])
            continue
        end_N = end_C[np.array(encoding.offsets, dtype=np.int64)[:, 1]]
        # Several tokens may share one character. Dropped text counts for the token after it.
        reached_N = np.maximum.accumulate(end_N)
        size_N = np.diff(reached_N, prepend=0)
        size_N[-1] += end_C[-1] - reached_N[-1]
        size_N[0] += dropped
        dropped = 0
        ids.append(np.array(encoding.ids, dtype=np.int32))
        sizes.append(size_N.astype(np.int32))
    if sizes:
        sizes[-1][-1] += dropped
    empty = [np.empty(0, dtype=np.int32)]
    return TokenizedText(
        torch.from_numpy(np.concatenate(ids or empty)), torch.from_numpy(np.concatenate(sizes or empty))
    )


def _separated(documents: Sequence[bytes], *, zeros: bool) -> Iterator[bytes | None]:
    """Yields the documents, with a zero byte (appended to the earlier one) or None between two."""
    for number, document in enumerate(documents, 1):
        last = number == len(documents)
        yield document if last or not zeros else document + b"\0"
        if not last and not zeros:
            yield None


def _pieces(documents: Iterable[bytes | None]) -> Iterator[str | None]:
    """Yields each document as text in pieces that end at the first line end after PIECE bytes; None stays None."""
    for text in documents:
        if text is None:
            yield None
            continue
        begin = 0
        while begin < len(text):
            end = text.find(b"\n", begin + PIECE) + 1 or len(text)
            yield text[begin:end].decode()
            begin = end


def _byte_ends(text: str) -> np.ndarray:
    """UTF-8 length of the first 0, 1, ..., len(text) characters: int64 (len(text) + 1,)."""
    point_C = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    size_C = 1 + (point_C > 0x7F).astype(np.int64) + (point_C > 0x7FF) + (point_C > 0xFFFF)
    return np.concatenate(([0], np.cumsum(size_C)))


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


@dataclass(frozen=True)
class Corpus:
    """Two splits of one text as tokens.

    Attributes:
        name: name for messages.
        train: tokens for training steps.
        held_out: tokens for evaluations only.
        vocab_size: the smallest vocabulary size of a model that can read the text.
        files: number of files that were read.
        skipped: number of files that were left out, in whole or in part, because they are not UTF-8 text.
        tokenizer: the file of the vocabulary; None for bytes.
    """

    name: str
    train: TokenizedText
    held_out: TokenizedText
    vocab_size: int
    files: int
    skipped: int
    tokenizer: Path | None = None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all ids, in hex. A run resumes only with the same tokens."""
        digest = hashlib.sha256()
        for id_N, _ in (self.train, self.held_out):
            digest.update(f"{id_N.dtype} {len(id_N)} ".encode())
            digest.update(id_N.numpy().data)
        return digest.hexdigest()


def _is_held_out(relative: str) -> bool:
    digest = hashlib.sha256(relative.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


@cache
def _sources() -> dict[str, Path]:
    """The files of the standard library by relative path, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    return {name.as_posix(): path for name, path in files.items() if SKIPPED.isdisjoint(name.parts)}


@cache
def read_split(split: Literal["train", "held_out"]) -> Tensor:
    """Reads all bytes of one split of the standard library.

    Returns:
        uint8 (N,): the files with a zero byte between two; empty if this Python ships without its sources. Every call
        returns the same tensor, so callers must not write to it.
    """
    held_out = split == "held_out"
    return as_bytes([path.read_bytes() for name, path in _sources().items() if _is_held_out(name) == held_out]).id_N


def read_corpus(data: Path | None = None, tokenizer: Path | None = None) -> Corpus:
    """Reads a text into memory, as tokens.

    Args:
        data: a folder of UTF-8 text, JSON lines and Parquet, or one such file; None for the standard
            library. Paths with a part that begins with a dot are ignored. If the hash puts all documents into one
            split, as it does with a single document, the last 5 % of the text are held out.
        tokenizer: a tokenizer.json of the package `tokenizers`; None for bytes.

    Raises:
        TrainError: the folder or the tokenizer does not exist, or no file is text.
        OSError: a file cannot be read.
    """
    if data is None and tokenizer is None:
        splits = TokenizedText(read_split("train"), None), TokenizedText(read_split("held_out"), None)
        return Corpus(SOURCES, *splits, vocab_size=BYTES, files=len(_sources()), skipped=0)
    paths = _sources() if data is None else _files(data)
    documents: dict[str, bytes] = {}
    files = skipped = 0
    for relative, path in paths.items():
        texts = dict(documents_of(path, relative))
        readable = {name: text for name, text in texts.items() if text and _is_text(text)}
        skipped += any(text and name not in readable for name, text in texts.items())
        files += bool(readable)
        documents |= readable
    if data is not None and not documents:
        raise TrainError(f"{data}: holds no UTF-8 text ({len(paths)} files looked at)")
    train = [text for relative, text in documents.items() if not _is_held_out(relative)]
    held_out = [text for relative, text in documents.items() if _is_held_out(relative)]
    if data is not None and not (train and held_out):
        train, held_out = _cut(list(documents.values()))
    name = SOURCES if data is None else str(data)
    if tokenizer is None:
        return Corpus(name, as_bytes(train), as_bytes(held_out), vocab_size=BYTES, files=files, skipped=skipped)
    vocabulary = load_tokenizer(tokenizer)
    size = vocabulary_size(vocabulary)
    splits = tokenize(train, vocabulary), tokenize(held_out, vocabulary)
    return Corpus(name, *splits, vocab_size=size, files=files, skipped=skipped, tokenizer=tokenizer)


def _files(data: Path) -> dict[str, Path]:
    """Path relative to the folder, with slashes -> file, sorted by path."""
    if data.is_file():
        return {data.name: data}
    if not data.is_dir():
        raise TrainError(f"{data}: no such folder or file")
    relative = {path.relative_to(data): path for path in data.rglob("*") if path.is_file()}
    files = {name.as_posix(): path for name, path in relative.items() if not any(p.startswith(".") for p in name.parts)}
    return dict(sorted(files.items()))


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    # UTF-8 allows zero bytes, but a text file has none, and here they separate documents.
    return b"\0" not in text


def _cut(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Splits the text into the first 95 % and the last 5 %, never within a character."""
    size = sum(map(len, documents)) + len(documents) - 1
    train: list[bytes] = []
    left = size - int(size * HELD_OUT_SHARE)
    for number, text in enumerate(documents):
        if len(text) > left:
            while left < len(text) and text[left] & 0xC0 == 0x80:
                left += 1
            held_out = [text[left:], *documents[number + 1 :]]
            return [*train, text[:left]] if left else train, [part for part in held_out if part]
        train.append(text)
        left = max(0, left - len(text) - 1)
    return train, []


def batch_at(text_N: Tensor, batch: int, seq: int, seed: int) -> Tensor:
    """Returns `batch` random windows of `seq` tokens: int64 (batch, seq). The same seed gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    start_B = torch.randint(0, len(text_N) - seq, (batch,), generator=generator)
    return text_N[start_B[:, None] + torch.arange(seq)].long()
