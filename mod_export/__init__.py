"""mod-export: turns a trained Mixture-of-Depths checkpoint into static, verified inference artefacts.

`load` opens a build folder for inference, `load_generator` for writing text; `mark_selection` is what a model calls to
have its routing observed. Everything else is the command line's: `mod-export --help`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mod_export.marker import mark_selection
    from mod_export.runtime.deployment import Deployment, load
    from mod_export.runtime.generate.generator import Generator, load_generator

__all__ = ["Deployment", "Generator", "__version__", "load", "load_generator", "mark_selection"]


def __getattr__(name: str) -> Any:
    # Late, so that importing the package (the command line's --help) costs nothing.
    if name == "__version__":
        return version("mod-export")
    if name in ("Deployment", "load"):
        from mod_export.runtime import deployment

        return getattr(deployment, name)
    if name in ("Generator", "load_generator"):
        from mod_export.runtime.generate import generator

        return getattr(generator, name)
    if name == "mark_selection":
        from mod_export import marker

        return marker.mark_selection
    raise AttributeError(f"module 'mod_export' has no attribute {name!r}")
