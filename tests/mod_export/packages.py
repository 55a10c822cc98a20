"""Packages that tests install, each of which registers an architecture, and a model as such a package may have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mod_export.model.architecture import Architecture
from mod_export.model.model import Model
from mod_export.model.transformer import TransformerModel


class OnlyReads(Architecture):
    """An architecture that ships no models and converts none; every checkpoint is another's."""

    def read(self, path: Path) -> Model:
        raise LookupError(path.name)

    def restore(self, spec: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Model:
        raise LookupError(spec)


class WithoutBaseline(TransformerModel):
    """A model with everything but a dense baseline."""

    def dense(self) -> None:
        return None


def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, module: str, code: str | None) -> None:
    """Installs a package that registers an architecture, in a folder of its own."""
    site = tmp_path / "site"
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mod_export.architectures]\n{name} = {module}:ARCHITECTURE\n")
    if code is not None:
        (site / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, module, raising=False)
