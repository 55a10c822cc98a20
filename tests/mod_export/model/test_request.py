"""Names of models in default build folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from mod_export.api import _name_of
from mod_export.cli.build import _default_folder
from mod_export.model.request import title_of


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("hf://org/Tiny-0.5B-Instruct", "Tiny-0.5B-Instruct"),
        ("hf://org/Tiny-0.5B@v1.0", "Tiny-0.5B"),
        ("hf://org/files/some-q4.gguf@main", "some-q4"),
        ("my_model.py:make", "my_model"),
        ("package.module:make", "package.module"),
        ("runs/model.pt", "model"),
        ("folders/Tiny-0.5B-Instruct", "Tiny-0.5B-Instruct"),
        ("a.pt2", "a"),
    ],
)
def test_a_build_folder_is_named_after_the_model(
    source: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folders/Tiny-0.5B-Instruct").mkdir(parents=True)
    assert title_of(source) == title
    assert _name_of(source) == _name_of([source, "other"]) == title
    assert _default_folder(source) == Path("build") / title
