"""mod-export: turns a trained Mixture-of-Depths checkpoint into static, verified inference artefacts.

`load` opens a build folder for inference, `load_generator` for writing text. Everything else is the command line's:
`mod-export --help`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mod_export.generation.generator import Generator, load_generator
    from mod_export.runtime import Deployment, load

__all__ = ["Deployment", "Generator", "__version__", "load", "load_generator"]


def __getattr__(name: str) -> Any:
    # Late, so that importing the package (the command line's --help) costs nothing.
    if name == "__version__":
        return version("mod-export")
    if name in ("Deployment", "load"):
        from mod_export import runtime

        return getattr(runtime, name)
    if name in ("Generator", "load_generator"):
        from mod_export.generation import generator

        return getattr(generator, name)
    raise AttributeError(f"module 'mod_export' has no attribute {name!r}")
