"""The corpus: two splits that share no file, the same at every call, and windows that are a function of their seed."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mod_models.corpus import SKIPPED, batch_at, read_split, split_files


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Python whose standard library is an empty folder, for a test to fill."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    read_split.cache_clear()
    yield tmp_path
    read_split.cache_clear()


def test_every_source_is_in_exactly_one_split() -> None:
    train, held_out = split_files("train"), split_files("held_out")
    assert set(train).isdisjoint(held_out)
    root = Path(sysconfig.get_paths()["stdlib"])
    every = {path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)}
    assert {*train, *held_out} == every
    assert 0.02 < len(held_out) / len(every) < 0.1


def test_the_side_of_a_file_is_the_same_on_every_machine(sources: Path) -> None:
    """A model trained on one machine is tested on another: these two have always been held out."""
    for name in ("abc.py", "copyreg.py", "email/__init__.py", "email/charset.py", "test/test_abc.py", "zzz.py"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).touch()
    held_out, train = ([path.relative_to(sources).as_posix() for path in split_files(s)] for s in ("held_out", "train"))
    assert held_out == ["copyreg.py", "email/__init__.py"]
    assert train == ["abc.py", "email/charset.py", "zzz.py"]


def test_text_is_the_files_with_a_zero_byte_between(sources: Path) -> None:
    for name in ("b.py", "a.py", "c.py"):
        (sources / name).write_bytes(name.encode())
    assert [path.name for path in split_files("train")] == ["a.py", "b.py", "c.py"]
    assert bytes(read_split("train").tolist()) == b"a.py\0b.py\0c.py"


def test_a_python_without_sources(sources: Path) -> None:
    assert len(read_split("train")) == 0
    assert read_split("held_out").dtype == torch.uint8


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_read_once_and_the_same(split: str) -> None:
    text_N = read_split(split)
    assert text_N.dtype == torch.uint8
    assert len(text_N) > 100_000
    assert read_split(split) is text_N
    first = split_files(split)[0].read_bytes()
    assert bytes(text_N[: len(first) + 1].tolist()) == first + b"\0"


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


def test_another_seed_gives_other_windows() -> None:
    text_N = read_split("train")
    assert not torch.equal(batch_at(text_N, 4, 32, 0), batch_at(text_N, 4, 32, 1))
