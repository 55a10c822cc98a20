"""The code of `make pair`, run for a few steps; its results are in docs/training.md."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.marked_part import marks
from benchmarks.pair import run as pair_run
from benchmarks.pair.run import NAMES, Pair, gather, make_tokenizer, options_of, pair_of, render, run_one
from benchmarks.study.models import flops_of_row
from mod_models.train.corpus import TOKENIZER, read_corpus

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "width": 64, "layers": 2, "vocabulary": 300, "seq": 32, "batch": 2, "learning_rate": 1e-3, "precision": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of(Namespace(**OPTIONS, tokens=10 * 64))


@pytest.fixture(scope="module")
def results(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    # A few real sources are enough here; all of them are 130 MB.
    (folder / "text").mkdir()
    for source in Path(json.__file__).parent.glob("*.py"):
        (folder / "text" / source.name).write_bytes(source.read_bytes())
    make_tokenizer(folder / "text", pair.dense.vocab_size, folder / TOKENIZER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_run, "HELD_OUT_BATCHES", 2)
        for name in NAMES:
            assert run_one(pair, folder, folder / "samples", name, 0).startswith(f"{name}, seed 0: ")
    return folder


def test_both_get_the_flops_that_the_dense_model_needs_for_its_tokens() -> None:
    pair = pair_of(Namespace(**OPTIONS, tokens=64e4))
    assert pair.config("dense", 0).steps == 10_000
    for name in NAMES:
        config = pair.config(name, 0)
        spent = config.steps * config.batch * flops_of_row(pair.spec(name), training=True, seq=config.seq)
        assert spent == pytest.approx(pair.flops, rel=0.01)


def test_the_vocabulary_fits_the_models(pair: Pair, results: Path) -> None:
    corpus = read_corpus(results / "text", results / TOKENIZER)
    assert corpus.vocab_size <= pair.dense.vocab_size
    assert len(corpus.held_out.id_N) > pair.seq


def test_a_run_is_not_repeated_and_results_of_other_runs_are_refused(pair: Pair, results: Path, tmp_path: Path) -> None:
    assert run_one(pair, results, results / "samples", "dense", 0) == "dense, seed 0: done before"
    other = replace(pair, batch=4)
    with pytest.raises(ValueError, match=r"dense-seed0\.json: was measured with other options; name another folder"):
        run_one(other, results, results / "samples", "dense", 0)
    shutil.copytree(results, tmp_path / "other")
    (tmp_path / "other" / "text" / "another.py").write_text("x = 1\n" * 100, encoding="utf-8")
    with pytest.raises(ValueError, match="was trained on the sources of another Python or of other packages"):
        run_one(pair, tmp_path / "other", tmp_path / "other" / "samples", "dense", 1)


def test_the_samples_that_are_kept_are_of_the_command_without_options() -> None:
    """They are older than some fields of a spec, and `make pair` continues them."""
    samples = sorted((ROOT / "docs" / "pair").glob("*.json"))
    assert samples
    for sample in samples:
        assert Pair.from_dict(json.loads(sample.read_text(encoding="utf-8"))["pair"]) == pair_of(options_of([])), sample


def test_the_sources_are_gathered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole standard library has thousands of files.
    roots = {"stdlib": tmp_path / "python3", "purelib": tmp_path / "site-packages"}
    for name in ("python3/json/decoder.py", "site-packages/onnx_ir/_core.py", "site-packages/onnx_ir/tests/a.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(pair_run.sysconfig, "get_paths", lambda: {name: str(root) for name, root in roots.items()})
    monkeypatch.setattr(pair_run, "PACKAGES", ("onnx_ir",))
    text = tmp_path / "text"
    gather(text)
    copied = sorted(path.relative_to(text).as_posix() for path in text.rglob("*.py"))
    assert copied == ["onnx_ir/_core.py", "python3/json/decoder.py"]
    monkeypatch.setattr(pair_run, "PACKAGES", ("no_such_package",))
    gather(text)
    assert sorted(path.relative_to(text).as_posix() for path in text.rglob("*.py")) == copied
    with pytest.raises(FileNotFoundError, match="no_such_package: this package is part of the text"):
        gather(tmp_path / "other")


def test_the_page(pair: Pair, results: Path, tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text("\n".join(["# Before", *marks("make pair"), "after"]), encoding="utf-8")
    render(pair, results / "samples", tmp_path)
    page = (tmp_path / "training.md").read_text(encoding="utf-8")
    assert page.startswith("# Before\n")
    assert page.endswith("\nafter")
    dense, mod = (line.split(" | ") for line in page.splitlines() if line.startswith(("| dense", "| MoD")))
    assert float(mod[4]) < float(dense[4]) == 1
    assert 0 < float(mod[5]) < 8.5
    # Predictors decide in the routed model only.
    assert (dense[7], mod[7] != "") == ("", True)
    assert "figures/pair.svg" in page
    assert (tmp_path / "figures" / "pair.svg").stat().st_size > 1000
