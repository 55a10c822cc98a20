"""Mixture-of-Depths transformers in plain PyTorch (`mod_models`). They use only `mod_export.marker` of the exporter.

Blocks of other models can use `tokens_of`, `select_tokens`, `select_chosen`, `forced_scores`, `gather_tokens` and
`scatter_tokens` (docs/models.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mod_models.declarations import tokens_of
    from mod_models.fixed_capacity import forced_scores, gather_tokens, scatter_tokens, select_chosen, select_tokens

__all__ = ["forced_scores", "gather_tokens", "scatter_tokens", "select_chosen", "select_tokens", "tokens_of"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that code that only reads a spec does not load torch.
    if name not in __all__:
        raise AttributeError(f"module 'mod_models' has no attribute {name!r}")
    return getattr(import_module(f"mod_models.{'declarations' if name == 'tokens_of' else 'fixed_capacity'}"), name)
