"""A build that is judged and timed on the user's own text, and `validate` and `bench` with it and without."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from writing import SPEC

from mod_export import build as build_from_python
from mod_export.folder.manifest import open_folder, read_manifest
from mod_export.pipeline.build import Build
from mod_export.rows.report import BuildReport, report_from_json
from mod_models.checkpoint import random_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("searching_few_rows")
RARE = "zq"
"""Two letters, so that the texts of these builds are unlike all other texts."""


@pytest.fixture(scope="module")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tickets.txt"
    path.write_text(RARE * 100)
    return path


@pytest.fixture(scope="module")
def own(writing_folder: Path, own_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The writing model, built with a text."""
    root = tmp_path_factory.mktemp("own") / "build"
    shutil.copytree(writing_folder / "build", root, ignore=shutil.ignore_patterns(".partial-*"))
    model, config = writing_folder / "writing.pt", writing_folder / "writing.toml"
    ran = invoke("build", model, "-c", config, "-o", root, "--text", own_text)
    assert ran.exit_code == 0, ran.stderr
    assert f"texts: from the named text tickets.txt, SHA-256 {_hash(own_text)[:12]}" in ran.stdout
    return root


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _report(root: Path) -> BuildReport:
    return report_from_json((root / "report.json").read_text())


def test_everything_that_reads_text_reads_that_of_the_user(own: Path, own_text: Path, written: Path) -> None:
    report, before = _report(own), _report(written)
    assert report.text is not None
    assert before.text is None
    assert (report.text.name, report.text.sha256) == ("tickets.txt", _hash(own_text))
    assert open_folder(own).text == report.text
    assert report.generation is not None
    assert before.generation is not None
    assert {row.text for row in report.generation.decode} == {report.generation.quality.text} == {"named"}
    assert {row.text for row in before.generation.decode} == {before.generation.quality.text} == {"held_out"}
    # Two letters have another perplexity than English, and other tokens run.
    assert report.generation.quality.perplexity != before.generation.quality.perplexity
    assert [row.selected for row in report.generation.decode] != [row.selected for row in before.generation.decode]
    assert report.routing_maps[0].tokens != before.routing_maps[0].tokens
    # Whole rows are judged on it in float32 too.
    whole = [row for row in report.parity if row.role == "forward"]
    assert whole
    assert all("text" in row.inputs for row in whole)
    assert f"--text {own_text} " in str(report.rebuild)
    page = (own / "report.html").read_text()
    assert f"come from the named text tickets.txt, SHA-256 {_hash(own_text)[:12]}, which" in page
    assert RARE * 3 not in page
    shown = [path.read_text() for path in own.iterdir() if path.suffix in (".json", ".html")]
    assert not any(RARE * 20 in text for text in shown)


def test_all_steps_that_read_text_are_done_again(own: Path, written: Path) -> None:
    before, after = (
        {name: step["fingerprint"] for name, step in read_manifest(root)["steps"].items()} for root in (written, own)
    )
    changed = {name.partition("/")[0] for name in after if after[name] != before[name]}
    assert changed == {"parity", "texts", "quality", "map", "first_token", "decode", "report"}


def test_steps_are_timed_on_several_texts(own: Path, written: Path) -> None:
    """At least four of them: one for each row, in as many turns as that takes."""
    for root in (own, written):
        generation = _report(root).generation
        assert generation is not None
        assert {row.bucket: row.texts for row in generation.decode} == {"b1s48": 4, "b3s48": 6}
        assert {row.positions for row in generation.decode} == {5}
    assert "5 positions in 4 or 6 texts (the named text)" in invoke("report", own).stdout


def test_a_finished_folder_is_run_with_the_text_or_says_that_another_was_read(
    own: Path, own_text: Path, tmp_path: Path
) -> None:
    note = "the text of the build, tickets.txt, was not given (--text), so another text was read"
    renamed, other = tmp_path / "renamed.txt", tmp_path / "other.txt"
    renamed.write_bytes(own_text.read_bytes())
    other.write_text("another text" * 99)
    for command in ("validate", "bench"):
        outputs = [invoke(command, own, *more).output for more in ((), ("--text", renamed), ("--text", other))]
        assert [note in output for output in outputs] == [True, False, True]


def test_a_finished_folder_reads_documentation_where_it_has_no_model(written: Path, own_text: Path) -> None:
    """Timing needs no model, and so has none of its held-out text."""
    opened = Build.open(written, None, (), verify=False)
    ids_NS, kind = opened.texts(2, 30)
    assert kind == "documentation"
    assert ids_NS.max() < 256
    opened = Build.open(written, None, (), text=own_text, verify=False)
    ids_NS, kind = opened.texts(2, 30)
    assert (kind, set(np.unique(ids_NS).tolist())) == ("named", set(RARE.encode()))


def test_a_text_that_does_not_fit_leaves_nothing_behind(writing_folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a" * 191)
    model, config = writing_folder / "writing.pt", writing_folder / "writing.toml"
    ran = invoke("build", model, "-c", config, "-o", tmp_path / "built", "--text", short)
    assert ran.exit_code == 2
    assert re.search(r"short\.txt: has 191 tokens; name a text of at least 192, 4 times the longest row", ran.stderr)
    assert not (tmp_path / "built").exists()


def test_a_model_without_a_tokenizer_reads_no_text(own_text: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "numbers.pt", random_checkpoint(replace(SPEC, vocab_size=100), 0))
    ran = invoke("build", tmp_path / "numbers.pt", "-o", tmp_path / "built", "--target", "ort-cpu", "--text", own_text)
    assert ran.exit_code == 2
    assert f"{own_text}: numbers has no tokenizer, so it reads no text; name one" in ran.stderr


def test_the_text_of_a_build_from_python(writing_folder: Path, written_copy: Path, own_text: Path) -> None:
    report = build_from_python(
        writing_folder / "writing.pt",
        config=writing_folder / "writing.toml",
        out=written_copy,
        text=own_text,
        verbosity=-1,
    )
    assert report.text is not None
    assert report.text.sha256 == _hash(own_text)
    assert f"text={str(own_text)!r}" in str(report.rebuild)
