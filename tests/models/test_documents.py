"""Documents in files with one document and with many."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mod_models.train import TrainError
from mod_models.train.corpus import documents_of, keep_tokenizer, read_corpus, tokenize


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff")
    assert list(documents_of(tmp_path / "a.txt", "a.txt")) == [("a.txt", b"one\ntwo\xff")]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = write_lines(tmp_path / f"a{suffix}", {"text": "one"}, {"id": 3, "text": "zw\u00f6lf"})
    path.write_text(path.read_text() + "\n  \n" + '{"text": ""}')
    assert list(documents_of(path, "b")) == [("b#1", b"one"), ("b#2", "zw\u00f6lf".encode()), ("b#5", b"")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"line 2: expected an object with a text in \"text\" \(Expecting property name"),
        ("[1]", r"line 2: expected an object .+\(list indices"),
        ('{"content": "a"}', r"line 2: expected an object .+\('text'\)$"),
        ('{"text": 3}', r"line 2: expected an object .+\('text' is int\)$"),
        ('{"text": "\\ud800"}', r"line 2: expected an object .+surrogates not allowed\)$"),
        ("[" * 10**5, r"line 2: expected an object .+recursion"),
    ],
)
def test_lines_without_text(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(TrainError, match=r"a\.jsonl: " + said):
        list(documents_of(tmp_path / "a.jsonl", "a"))


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "text": ["one", None, "zw\u00f6lf"]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = list(documents_of(tmp_path / "a.parquet", "a"))
    assert found == [("a#1", b"one"), ("a#2", b""), ("a#3", "zw\u00f6lf".encode())]


def test_parquet_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(TrainError, match=r"a\.parquet: not a readable Parquet file \("):
        list(documents_of(path, "a"))
    parquet.write_table(pa.table({"content": ["a"], "id": [1]}), path)
    with pytest.raises(TrainError, match=r"a\.parquet: has the columns content, id, expected 'text'$"):
        list(documents_of(path, "a"))
    parquet.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(TrainError, match=r"a\.parquet: the column 'text' holds int, expected text$"):
        list(documents_of(path, "a"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(TrainError, match=r"a\.parquet: Parquet needs the package pyarrow; pip install 'mod-export\["):
        list(documents_of(path, "a"))


# Corpora.


def test_documents_of_one_file_are_split_by_their_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"text": f"document {i}"} for i in range(400)))
    corpus = read_corpus(path)
    held_out = bytes(corpus.held_out.id_N.tolist()).split(b"\0")
    train = bytes(corpus.train.id_N.tolist()).split(b"\0")
    assert sorted([*held_out, *train]) == sorted(b"document %d" % i for i in range(400))
    assert 8 <= len(held_out) <= 40
    assert (corpus.files, corpus.skipped) == (1, 0)
    # An added line changes nothing for the earlier ones.
    more = read_corpus(write_lines(tmp_path / "a.jsonl", *({"text": f"document {i}"} for i in range(401))))
    assert set(held_out) <= set(bytes(more.held_out.id_N.tolist()).split(b"\0"))


def test_files_with_and_without_text(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "a.jsonl", {"text": "one " * 20}, {"text": "z\0z"}, {"text": ""})
    write_lines(tmp_path / "data" / "b.jsonl", {"text": "\0"})
    corpus = read_corpus(tmp_path / "data")
    assert (corpus.files, corpus.skipped) == (1, 2)


def words(*special: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name) for name in special])
    return tokenizer


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>"])
def test_documents_are_separated_by_the_end_of_text(name: str) -> None:
    found = tokenize([b"a b", b"b", b"a a"], words("<other>", name))
    assert found.id_N.tolist() == [0, 1, 4, 1, 4, 0, 0]
    assert int(found.size_N.sum()) == len(b"a b\0b\0a a")
    assert found.size_N.tolist() == [1, 2, 1, 1, 1, 1, 2]


def test_without_one_by_a_zero_byte() -> None:
    assert tokenize([b"a b", b"b"], words()).id_N.tolist() == [0, 1, 2, 1]


def test_dropped_text_before_a_separator_is_its_own() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens([AddedToken("</s>")])
    found = tokenize([b"xyz", b"a", b"xx"], tokenizer)
    assert found.id_N.tolist() == [1, 0, 1]
    assert found.size_N.tolist() == [4, 1, 1 + 2]


def test_a_tokenizer_travels_with_its_companions(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    for name in ("own.json", "generation_config.json", "chat_template.jinja", "config.json"):
        (tmp_path / "from" / name).write_text(name)
    keep_tokenizer(tmp_path / "from" / "own.json", tmp_path / "to")
    kept = {path.name: path.read_text() for path in (tmp_path / "to").iterdir()}
    assert kept == {
        "tokenizer.json": "own.json",
        "generation_config.json": "generation_config.json",
        "chat_template.jinja": "chat_template.jinja",
    }
    # Source and destination are equal if a run resumes from the folder that it writes to.
    keep_tokenizer(tmp_path / "to" / "tokenizer.json", tmp_path / "to")
