"""Manifests of build folders that were changed by somebody who knows how to sign them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mod_export.workspace import read_manifest


def rewrite_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and makes it look as if it had been written so."""
    manifest = read_manifest(root)
    change(manifest)
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps({**manifest, "checksum": checksum}))


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
