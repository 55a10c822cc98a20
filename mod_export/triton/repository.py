"""Writes a model repository to disk: into a temporary folder first, then renamed. Never overwrites foreign files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mod_export.errors import UsageError
from mod_export.folder.files import PARTIAL, replace_file, verify_files
from mod_export.folder.manifest import MANIFEST
from mod_export.runtime.deployment import warn_unverified
from mod_export.triton.config import TritonModel, config_text
from mod_export.triton.models import VERSION, RepositoryRequest, forward_models, text_model

MARKER = ".mod-export-triton.json"
"""File that lists the models this command wrote. Triton ignores it, because it looks at folders only."""
ELSEWHERE = "name a new folder with -o"


def write_repository(request: RepositoryRequest, root: Path) -> tuple[list[TritonModel], str]:
    """Writes the models of a request, and replaces those that an earlier request of the same name wrote.

    Args:
        request: the request.
        root: the repository folder, created if missing.

    Returns:
        The models, starting with the one that runs whole rows; and the reason why none writes text, or "".

    Raises:
        UsageError: the folder cannot be served this way, or this command must not write to the repository.
        BuildFolderError: a file of the build folder is missing or damaged.
        TargetError: no engine runs here, or the engines or graphs missed their gates.
    """
    root = root.absolute()
    _check_place(request.folder, root)
    owned = _owned(root)
    models = forward_models(request)
    text = text_model(request)
    if isinstance(text, TritonModel):
        models.append(text)
    _check_names(root, owned, request.model_name, models)
    warn_unverified(request.folder, request.manifest)
    _verify(request, models)
    with _explained(root), _beside(root) as stage:
        for model in models:
            _write_model(stage / model.name, model)
        _put(stage, root, owned, request.model_name, [model.name for model in models])
    return models, "" if isinstance(text, TritonModel) else text.reason


def _check_place(folder: Path, root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: is a file; {ELSEWHERE}")
    if root.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{root}: lies in the build folder {folder}; {ELSEWHERE} outside of it")


def _owned(root: Path) -> dict[str, list[str]]:
    """Name of a request -> names of the models that it wrote."""
    if not root.is_dir() or not any(root.iterdir()):
        return {}
    try:
        data = json.loads((root / MARKER).read_text(encoding="utf-8"))
        owned: dict[str, list[str]] = {str(name): [str(model) for model in models] for name, models in data.items()}
    except FileNotFoundError:
        foreign = ", ".join(sorted(path.name for path in root.iterdir())[:3])
        raise UsageError(
            f"{root}: holds files that `mod-export triton` did not write ({foreign}); {ELSEWHERE}"
        ) from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{root / MARKER}: cannot be read ({error}); {ELSEWHERE}") from error
    return owned


def _check_names(root: Path, owned: Mapping[str, Sequence[str]], name: str, models: Sequence[TritonModel]) -> None:
    foreign_names = [
        model.name for model in models if (root / model.name).exists() and model.name not in owned.get(name, ())
    ]
    if foreign_names:
        owner = next((request_name for request_name, names in owned.items() if foreign_names[0] in names), None)
        wrote = "which this command did not write" if owner is None else f"which was written for --name {owner}"
        raise UsageError(f"{root}: holds a model {foreign_names[0]}, {wrote}; give another --name, or {ELSEWHERE}")


def _verify(request: RepositoryRequest, models: Sequence[TritonModel]) -> None:
    """Compares the files to place with their hashes, so that no damaged file gets into the repository."""
    sources = {source for model in models for source in model.files.values() if isinstance(source, Path)}
    paths = sorted(str(source.relative_to(request.folder)) for source in sources)
    verify_files(request.folder, request.manifest.entries(path for path in paths if path != MANIFEST))


def _write_model(folder: Path, model: TritonModel) -> None:
    (folder / VERSION).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config_text(model), encoding="utf-8")
    for name, source in model.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            path.write_bytes(source)
        else:
            _place(source, path)


def _place(source: Path, path: Path) -> None:
    """Creates a hard link, which takes no space, or a copy if that fails. A symbolic link would leave the repository,
    which ONNX Runtime refuses.
    """
    try:
        path.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, path)


@contextlib.contextmanager
def _beside(root: Path) -> Iterator[Path]:
    """Creates a temporary folder on the file system of the repository, but outside of it: a running Triton would take a
    folder inside for a model. It is inside only if the folder above is on another file system or not writable.
    """
    place = next(folder for folder in root.parents if folder.exists())
    if root.exists() and (root.stat().st_dev != place.stat().st_dev or not os.access(place, os.W_OK | os.X_OK)):
        place = root
    with tempfile.TemporaryDirectory(dir=place, prefix=PARTIAL) as temporary:
        stage = Path(temporary) / "repository"
        stage.mkdir()
        yield stage


def _put(stage: Path, root: Path, owned: Mapping[str, list[str]], name: str, models: list[str]) -> None:
    """Moves the written models into the repository, and removes models left over from earlier requests of this name."""
    before = owned.get(name, [])
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        _write_marker(stage, {name: models})
        stage.rename(root)
        return
    # Until all is in place, the marker lists both old and new models, so an interrupted command can be repeated.
    _write_marker(root, {**owned, name: [*dict.fromkeys([*before, *models])]})
    old = stage.parent / "old"
    old.mkdir()
    for model in [*dict.fromkeys([*models, *before])]:
        if (root / model).exists():
            (root / model).rename(old / model)
        if model in models:
            (stage / model).rename(root / model)
    _write_marker(root, {**owned, name: models})


def _write_marker(root: Path, owned: Mapping[str, Sequence[str]]) -> None:
    replace_file(root / MARKER, json.dumps(owned, indent=1) + "\n")


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Turns write errors of the operating system into a message for the user."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise UsageError(f"{root}: cannot write {where} ({error.strerror}); {ELSEWHERE}") from error
