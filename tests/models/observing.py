"""Runs an eager model and observes its routing sites, which have the same markers as in a captured program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mod_export.graph.sites import Selection, SiteRun
from mod_export.marker import MARKER
from mod_models.spec import Site


class Observing(TorchDispatchMode):
    def __init__(self, run: SiteRun) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run.mark(*args) if func is MARKER else func(*args, **(kwargs or {}))


def observed(
    model: torch.nn.Module, ids_BS: Tensor, lengths_B: Tensor, forced: Mapping[Site, Tensor] | None = None
) -> tuple[Tensor, dict[Site, Selection]]:
    """Returns the model's first output and the selection of every site; `forced` as in `SiteRun`."""
    run = SiteRun(ids_BS.shape[1], forced)
    with Observing(run):
        first, *_ = model(ids_BS, lengths_B)
    return first, run.selections
