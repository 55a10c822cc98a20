"""mod-export: turns a trained Mixture-of-Depths checkpoint into static, verified inference artefacts.

`build` makes a build folder of a model. `load` opens a build folder for inference, `load_generator` for writing text. A
model calls `mark_selection` to have its routing observed. All of them raise `ModExportError`. Everything else is on the
command line: `mod-export --help`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mod_export.api import build
    from mod_export.errors import ModExportError
    from mod_export.marker import mark_selection
    from mod_export.runtime.deployment import Deployment, load
    from mod_export.runtime.generator import Generator, load_generator

__all__ = [
    "Deployment",
    "Generator",
    "ModExportError",
    "__version__",
    "build",
    "load",
    "load_generator",
    "mark_selection",
]


_MODULES = {
    "build": "api",
    "Deployment": "runtime.deployment",
    "load": "runtime.deployment",
    "Generator": "runtime.generator",
    "load_generator": "runtime.generator",
    "ModExportError": "errors",
    "mark_selection": "marker",
}


def __getattr__(name: str) -> Any:
    # Imported on first access, so that importing the package stays fast (for example for --help).
    if name == "__version__":
        return version("mod-export")
    if name not in _MODULES:
        raise AttributeError(f"module 'mod_export' has no attribute {name!r}")
    return getattr(import_module(f"mod_export.{_MODULES[name]}"), name)
