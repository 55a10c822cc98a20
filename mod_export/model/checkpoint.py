"""Turns a checkpoint into a model: finds its architecture and reads its weights.

Architectures are defined in other packages, which register them in the entry-point group `mod_export.architectures`. A
checkpoint names an architecture, never a module or a file, so reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.environment import extra_of_import
from mod_export.errors import BuildFolderError, CheckpointError
from mod_export.folder.files import sha256_of_file
from mod_export.folder.manifest import MANIFEST, read_manifest
from mod_export.model.architecture import GROUP, Architecture, Converted
from mod_export.model.hub import name_of
from mod_export.model.model import Model, Origin
from mod_export.model.other_files import adapter_to_convert, lone_file, what_files, what_source
from mod_export.model.tokenizer_files import TokenizerFiles, files_in, has_tokenizer, read_tokenizer

if TYPE_CHECKING:
    import torch

GGUF, MAGIC = ".gguf", b"GGUF"


def architectures() -> dict[str, Architecture]:
    """Returns every registered architecture by name.

    Raises:
        CheckpointError: no package registers an architecture, or a registered object cannot be loaded or is not an
            architecture.
        ImportError: a module of one of mod-export's extras is missing; the command line says which extra.
    """
    loaded: dict[str, Architecture] = {}
    for entry in entry_points(group=GROUP):
        try:
            architecture = entry.load()
        except (ImportError, AttributeError) as error:
            if isinstance(error, ImportError) and extra_of_import(error) is not None:
                raise  # The architecture is not broken; an extra of mod-export is not installed.
            raise CheckpointError(
                f"architecture {entry.name!r} cannot be loaded from {entry.value} ({error}); repair or remove the "
                "package that registers it"
            ) from error
        if not isinstance(architecture, Architecture):
            raise CheckpointError(
                f"architecture {entry.name!r}: {entry.value} is no mod_export.model.architecture.Architecture; "
                "repair or remove the package that registers it"
            )
        loaded[entry.name] = architecture
    if not loaded:
        raise CheckpointError(f"no architecture is registered in the entry-point group {GROUP}; reinstall mod-export")
    return loaded


def look_at_checkpoint(path: Path) -> None:
    """Refuses, before PyTorch is loaded, a path that cannot be a checkpoint.

    Raises:
        CheckpointError: the path does not exist, is of a known kind that is no checkpoint, or is neither a folder with
            a config.json nor an archive as torch.save writes it.
    """
    try:
        description = what_source(path) or adapter_to_convert(path)
        problem = "" if description else _problem(path)
    except OSError as error:
        description, problem = "", f"cannot be read ({error.strerror})"
    if description or problem:
        raise CheckpointError(description or f"{path}: {problem}")


def _problem(path: Path) -> str:
    if not path.exists():
        return "no such file or folder"
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        expected = "expected config.json and model.safetensors, or a model.pt"
        return "" if has_config else f"no config.json in this folder; {expected}"
    if path.suffix == ".safetensors":
        return "weights without a spec; give the folder that holds it beside its config.json"
    if path.is_file() and not is_gguf(path):
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                return (
                    "not a model.pt as torch.save writes it: truncated, or not a checkpoint, or a bare pickle, which "
                    "could run code and is not read"
                )
    return ""


def is_gguf(path: Path) -> bool:
    """Returns whether the path is a file of llama.cpp, which holds a whole model with its tokenizer. Its first bytes
    count too, because some programs store such files under names without a suffix.
    """
    if not path.is_file():
        return False
    if path.suffix == GGUF:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def model_from_checkpoint(path: Path) -> Model:
    """Reads a model.pt, a folder of config.json and model.safetensors, or a format that an architecture can convert.

    Raises:
        CheckpointError: the path does not exist, or is not a usable checkpoint.
    """
    look_at_checkpoint(path)
    foreign = ""
    for name, architecture in architectures().items():
        try:
            model = architecture.read(path)
        except LookupError as error:
            foreign = str(error.args[0]) if error.args else str(error)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        else:
            model.origin = Origin(
                name=name_of(path).removesuffix(".pt").removesuffix(GGUF),
                architecture=name,
                package=architecture.package,
                checkpoint_sha256=sha256_of(path),
            )
            return model
    known = ", ".join(architectures())
    raise CheckpointError(
        f"{path}: names the architecture {foreign!r}, which nothing here provides; known: {known}. "
        f"Install the package that registers it in the entry-point group {GROUP}"
    )


def model_from_outline(path: Path) -> Model:
    """Reads the model that a JSON file declares, such as the config.json of a hub folder, without weights.

    Raises:
        CheckpointError: the file cannot be read, or declares no model that an architecture describes.
    """
    for name, architecture in architectures().items():
        try:
            model = architecture.outline(path)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if model is not None:
            model.origin = Origin(name=path.parent.name or path.stem, architecture=name, package=architecture.package)
            return model
    raise CheckpointError(f"{path}: declares no model; expected the config.json of a model, or a spec")


def convert(
    source: Path,
    out: Path,
    max_positions: int | None = None,
    ignored: Collection[str] = (),
    written: Callable[[int, int], None] = lambda done, all_: None,
    implementation: str | None = None,
    capacity: float | None = None,
    base: Path | None = None,
) -> Converted:
    """Writes a model in another format as a checkpoint folder; see `Architecture.convert`.

    Raises:
        CheckpointError: the source is of a known kind that is no model, no installed architecture converts models, or
            the model cannot be converted.
    """
    describe = what_source if implementation is None else what_files
    try:
        problem = describe(source) or lone_file(source) or ("" if base is None else what_source(base))
    except OSError as error:
        problem = f"{source}: cannot be read ({error.strerror})"
    if problem:
        raise CheckpointError(problem)
    for architecture in architectures().values():
        try:
            converted = architecture.convert(
                source, out, max_positions, ignored, written, implementation, capacity, base
            )
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if converted is not None:
            return converted
    raise CheckpointError(f"{source}: no architecture that is installed here converts models of other formats")


def companions_in(source: Path) -> tuple[TokenizerFiles | None, tuple[str, ...]]:
    """Returns the tokenizer inside a file in another format, or else the file's settings about text, and the notes of
    the file's reader.

    Raises:
        CheckpointError: the file cannot be converted.
        UsageError: the tokenizer cannot be read.
    """
    for architecture in architectures().values():
        try:
            converted = architecture.look(source)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if converted is not None:
            with tempfile.TemporaryDirectory() as name:
                for companion, content in converted.companions.items():
                    (Path(name) / companion).write_bytes(content())
                folder = Path(name)
                if has_tokenizer(folder):
                    return read_tokenizer(folder, shown=source), converted.notes
                files = files_in(folder)
            return None if files is None else replace(files, path=source), converted.notes
    return None, ()


def model_from_weights(architecture: str, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Model:
    """Restores the model of a build folder from its spec and weights.

    Raises:
        CheckpointError: the architecture is not installed, or cannot use the spec.
    """
    known = architectures()
    if architecture not in known:
        raise CheckpointError(f"architecture {architecture!r} is not installed here; known: {', '.join(known)}")
    try:
        return known[architecture].restore(spec, weights)
    except ValueError as error:
        raise CheckpointError(f"the build folder's spec cannot be restored: {error}") from error


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files in order of their names. The names are part of the digest.

    Build folders inside it are left out, because `mod-export build .` writes into the checkpoint's folder by default.
    """
    if path.is_file():
        return sha256_of_file(path)
    digest = hashlib.sha256()
    for file_path in files_of(path):
        digest.update(f"{file_path.relative_to(path).as_posix()}\0{sha256_of_file(file_path)}\n".encode())
    return digest.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Returns every file of a checkpoint's folder, without the build folders in it."""
    builds = {manifest.parent for manifest in folder.rglob(f"*/{MANIFEST}") if _is_build_folder(manifest.parent)}
    return sorted(item for item in folder.rglob("*") if item.is_file() and builds.isdisjoint(item.parents))


def _is_build_folder(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except BuildFolderError:
        return False
    return True
