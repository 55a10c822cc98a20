"""Packages that tests install, each of which registers an architecture, and a model as such a package may have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mod_export.model.transformer import TransformerModel


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
