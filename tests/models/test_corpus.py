"""The corpus: two splits that share no file and never change, and windows that are a function of their seed."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mod_models.train import TrainError
from mod_models.train import corpus as corpus_module
from mod_models.train.corpus import SKIPPED, Corpus, TokenizedText, batch_at, read_corpus, read_split


def forget_sources() -> None:
    read_split.cache_clear()
    corpus_module._sources.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Gives Python an empty folder as its standard library, which a test can fill."""
    paths = sysconfig.get_paths
    # Coverage measurement asks for schemes by name meanwhile.
    monkeypatch.setattr(sysconfig, "get_paths", lambda *scheme: paths(*scheme) if scheme else {"stdlib": str(tmp_path)})
    forget_sources()
    yield tmp_path
    forget_sources()


def test_the_side_of_a_file_is_the_same_on_every_machine(sources: Path) -> None:
    """A model may be trained on one machine and tested on another: these two files are always held out."""
    # A Python may lack the sources of its library.
    assert len(read_split("train")) == 0
    assert read_split("held_out").dtype == torch.uint8
    forget_sources()
    for name in ("abc.py", "copyreg.py", "email/__init__.py", "email/charset.py", "test/test_abc.py", "zzz.py"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).write_text(name)
    assert bytes(read_split("held_out").tolist()) == b"copyreg.py\0email/__init__.py"
    assert bytes(read_split("train").tolist()) == b"abc.py\0email/charset.py\0zzz.py"


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**40), st.integers(1, 30))
def test_windows(batch: int, seq: int, seed: int, spare: int) -> None:
    text_N = torch.arange(seq + spare, dtype=torch.uint8)
    before = torch.random.get_rng_state()
    window_BS = batch_at(text_N, batch, seq, seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert window_BS.shape == (batch, seq)
    assert window_BS.dtype == torch.int64
    assert bool((window_BS.diff(dim=1) == 1).all())
    assert torch.equal(window_BS, batch_at(text_N, batch, seq, seed))


# A given text.


def as_text(tokens: TokenizedText) -> bytes:
    return bytes(tokens.id_N.tolist())


def write(folder: Path, **texts: bytes) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text)


def test_the_standard_library_by_default() -> None:
    """Every source is in exactly one split."""
    corpus = read_corpus()
    assert corpus.train.id_N is read_split("train")
    assert corpus.held_out.id_N is read_split("held_out")
    assert (corpus.name, corpus.vocab_size, corpus.skipped) == ("this Python's sources", 256, 0)
    root = Path(sysconfig.get_paths()["stdlib"])
    every = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
    size = sum(path.stat().st_size + 1 for path in every)
    assert corpus.files == len(every)
    assert len(corpus.train.id_N) + len(corpus.held_out.id_N) == size - 2  # a zero byte between two files of a split
    assert 0.01 < len(corpus.held_out.id_N) / size < 0.15


def test_the_standard_library_with_a_tokenizer(sources: Path, tmp_path: Path) -> None:
    write(sources, **{"copyreg.py": b"held out", "abc.py": b"train", "site.py": b"\xff", "ast.py": b"train"})
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate("heldoutrain")}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = read_corpus(None, tmp_path / "tokenizer.json")
    assert (corpus.name, corpus.files, corpus.skipped) == ("this Python's sources", 3, 1)
    assert tokenizer.decode(corpus.train.id_N.tolist()).replace(" ", "") == "traintrain"
    assert tokenizer.decode(corpus.held_out.id_N.tolist()).replace(" ", "") == "heldout"


def test_a_folder_is_split_by_path(tmp_path: Path) -> None:
    for name in ("copyreg.py", "abc.py", "email/charset.py", "email/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = read_corpus(tmp_path)
    # The sides equal those in the standard library, no matter which other files are there.
    assert as_text(corpus.train) == b"abc.py\0email/charset.py"
    assert as_text(corpus.held_out) == b"copyreg.py\0email/__init__.py"
    assert (corpus.name, corpus.files, corpus.skipped) == (str(tmp_path), 4, 0)
    assert corpus.train.size_N is None


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, a=b"text " * 10, b="\u00fcber".encode(), c=b"\xff\xfe", d=b"z\0z", empty=b"")
    write(tmp_path / ".git", config=b"hidden")
    write(tmp_path, **{".hidden": b"hidden"})
    corpus = read_corpus(tmp_path)
    assert (corpus.files, corpus.skipped) == (2, 2)
    # Neither path is on the held-out side, so it gets the end of the text.
    assert as_text(corpus.train) + as_text(corpus.held_out) == b"text " * 10 + b"\0" + "\u00fcber".encode()
    assert as_text(corpus.held_out) == b"er"


@pytest.mark.parametrize("named", ["file", "folder"])
def test_of_a_single_file_the_end_is_held_out(tmp_path: Path, named: str) -> None:
    write(tmp_path / "one", **{"a.txt": bytes(range(32, 127)) * 10})
    corpus = read_corpus(tmp_path / "one" if named == "folder" else tmp_path / "one" / "a.txt")
    assert as_text(corpus.train) + as_text(corpus.held_out) == bytes(range(32, 127)) * 10
    assert len(corpus.held_out.id_N) == 47


@given(st.text(st.sampled_from("a\u00e4\u20ac\U0001f600"), min_size=20, max_size=60))
def test_no_character_is_cut(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text, encoding="utf-8")
    corpus = read_corpus(path)
    assert as_text(corpus.train).decode() + as_text(corpus.held_out).decode() == text


def test_fingerprint_is_of_the_text(tmp_path: Path) -> None:
    texts = {"one": b"some text " * 9, "two": b"some text " * 9, "three": b"some texT " * 9}
    found: dict[str, Corpus] = {}
    for name, text in texts.items():
        write(tmp_path / name, file=text)
        found[name] = read_corpus(tmp_path / name)
    assert found["one"].fingerprint == found["two"].fingerprint != found["three"].fingerprint
    digest = hashlib.sha256()
    for split in (texts["one"][:86], texts["one"][86:]):
        digest.update(b"torch.uint8 %d " % len(split) + split)
    assert found["one"].fingerprint == digest.hexdigest()


def test_folders_that_hold_no_text(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"nowhere: no such folder or file$"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(TrainError, match=r": holds no UTF-8 text \(0 files looked at\)$"):
        read_corpus(tmp_path)
    write(tmp_path, picture=b"\xff", empty=b"")
    with pytest.raises(TrainError, match=r": holds no UTF-8 text \(2 files looked at\)$"):
        read_corpus(tmp_path)
