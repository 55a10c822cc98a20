"""The public Python API as text, read from the sources by griffe without importing them.

    make api        # writes tests/mod_export/public_api.txt anew: at a release, and at no other time

The text has a section for each module, in the form of a stub file: names, parameters and annotations, no values and no
docstrings. griffe reads it back as modules, and so compares a later state of the sources with it.
"""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import griffe

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).parent / "public_api.txt"
PUBLIC: Mapping[str, tuple[str, ...]] = {
    "mod_export": (),
    "mod_export.errors": (),
    "mod_export.model.architecture": ("Architecture", "Converted"),
    "mod_export.model.model": ("GeneratingModel", "GraphSource", "LayerCost", "Model", "Origin", "TokenIds"),
    # The options of `generate` and `stream` are those of `texts`.
    "mod_export.runtime.request": ("GenerationDefaults", "RequestReader.texts"),
    "mod_export.runtime.rows": ("Completion", "Piece", "Prefix"),
    "mod_export.runtime.stream": ("Stream",),
    "mod_export.types": ("Bucket",),
    "mod_models": (),
    "mod_models.checkpoint": (
        "Checkpoint", "CheckpointError", "ForeignArchitectureError", "load_checkpoint", "random_checkpoint",
        "save_checkpoint",
    ),
    "mod_models.spec": (),
}  # fmt: skip
"""Module -> its public names; those of its `__all__` if none is given."""
RETURNED = ("Completion", "Deployment", "Generator", "Prefix", "Stream")
"""Classes that only functions of mod-export make; how they are made is nobody else's business."""
SPECIAL = ("__init__", "__enter__", "__exit__", "__iter__", "__next__", "__call__")
HEAD = "# The public API of mod-export "
SECTION = "# module "


def public_api() -> str:
    """Returns the public API of the working tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"]
    # griffe calls a package by the name of its folder.
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("mod_export", "mod_models"):
            only_python = shutil.ignore_patterns("__pycache__", "checkpoints")
            shutil.copytree(ROOT / folders[name], Path(temporary) / name, ignore=only_python)
        loader = griffe.GriffeLoader(search_paths=[temporary], allow_inspection=False)
        packages = {name: loader.load(name, try_relative_path=False) for name in ("mod_export", "mod_models")}
        loader.resolve_aliases()
        sections = [f"{HEAD}{project['project']['version']}, written by `make api`.\n"]
        for path, names in PUBLIC.items():
            package, _, inside = path.partition(".")
            module = packages[package][inside] if inside else packages[package]
            listed = names or [str(name) for name in module.exports if name != "__version__"]
            lines = [line for name in sorted(listed) for line in _stub(_target(module[name]), "")]
            sections.append("\n".join([f"{SECTION}{path}", *lines, ""]))
    return "\n".join(sections)


def _target(one: griffe.Object | griffe.Alias) -> griffe.Object:
    return one.final_target if isinstance(one, griffe.Alias) else one


def _stub(one: griffe.Object, indent: str) -> Iterator[str]:
    """Yields the lines of a stub."""
    if isinstance(one, griffe.Class):
        bases = ", ".join(map(str, one.bases))
        yield f"{indent}class {one.name}({bases}):" if bases else f"{indent}class {one.name}:"
        inside = f"{indent}    "
        members = {name: list(_stub(member, inside)) for name, member in one.members.items() if _shown(one, member)}
        # Static analysis does not see `self.a, self.b = ...`; the docstring names the attributes that are public.
        documented = {name: [f"{inside}{name} = ..."] for name in _documented(one)}
        yield from (line for _, lines in sorted({**documented, **members}.items()) for line in lines)
        if not members and not documented:
            yield f"{inside}..."
    elif isinstance(one, griffe.Function):
        yield from (f"{indent}@{label}" for label in ("classmethod", "staticmethod") if label in one.labels)
        parameters = ", ".join(_parameters(one.parameters))
        returns = f" -> {one.returns}" if one.returns is not None else ""
        yield f"{indent}def {one.name}({parameters}){returns}: ..."
    elif "property" in one.labels and isinstance(one, griffe.Attribute):
        returns = f" -> {one.annotation}" if one.annotation is not None else ""
        yield from (f"{indent}@property", f"{indent}def {one.name}(self){returns}: ...")
    elif isinstance(one, griffe.Attribute):
        annotation = f": {one.annotation}" if one.annotation is not None else ""
        yield f"{indent}{one.name}{annotation} = ..."


def _shown(owner: griffe.Class, member: griffe.Object | griffe.Alias) -> TypeGuard[griffe.Object]:
    special = SPECIAL[1:] if owner.name in RETURNED else SPECIAL
    return not member.is_alias and (not member.name.startswith("_") or member.name in special)


def _documented(one: griffe.Class) -> list[str]:
    """Returns the names in the section `Attributes` of a class's docstring."""
    sections = one.docstring.parse("google", warnings=False) if one.docstring else []
    attributes = (section for section in sections if isinstance(section, griffe.DocstringSectionAttributes))
    return [attribute.name for section in attributes for attribute in section.value]


def _parameters(parameters: Iterable[griffe.Parameter]) -> Iterator[str]:
    """Yields the parameters of a function as Python writes them, with `/` and `*` where they belong."""
    kinds, before = griffe.ParameterKind, None
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    for one in parameters:
        if before == kinds.positional_only and one.kind != kinds.positional_only:
            yield "/"
        if one.kind == kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            yield "*"
        annotation = f": {one.annotation}" if one.annotation is not None else ""
        default = f" = {one.default}" if one.default is not None and one.kind not in stars else ""
        yield f"{stars.get(one.kind, '')}{one.name}{annotation}{default}"
        before = one.kind
    if before == kinds.positional_only:
        yield "/"


def modules(text: str) -> dict[str, griffe.Module]:
    """Reads the text back: module -> its public names, as griffe's objects."""
    found = {}
    for section in text.split(f"\n{SECTION}")[1:]:
        path, _, code = section.partition("\n")
        found[path] = griffe.visit(path.replace(".", "_"), filepath=Path(f"{path}.pyi"), code=code)
    return found


def breakages(before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """Yields what breaks programs that use the API: the public name, its module, and how it changed."""
    old, new = modules(before), modules(after)
    for path, module in old.items():
        if path not in new:
            yield path.rpartition(".")[2], path, "the module is no longer public"
            continue
        for breakage in griffe.find_breaking_changes(module, new[path]):
            name = breakage.obj.path.partition(".")[2] or breakage.obj.path
            yield name, path, _one_line(breakage)


def _one_line(breakage: griffe.Breakage) -> str:
    """Returns what happened, and to which parameter or from what to what."""
    values = [getattr(value, "name", value) for value in (breakage.old_value, breakage.new_value)]
    texts = dict.fromkeys(str(value) for value in values if isinstance(value, (str, griffe.Expr)))
    return ": ".join([breakage.kind.value, *([" -> ".join(texts)] if texts else [])])


if __name__ == "__main__":
    FROZEN.write_text(public_api(), encoding="utf-8")
