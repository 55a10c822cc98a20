"""Builds engines in this process, which has been changed before, as `mod-export build --no-evidence` does."""

from __future__ import annotations

from pathlib import Path


def build(checkpoint: str, config: str, root: Path) -> None:
    """Runs the command line's build. Import this function only once the process is as the build shall find it.

    Raises:
        RuntimeError: something could not be built. What it was is on stderr.
    """
    from mod_export.cli import cli

    try:
        cli(["build", checkpoint, "-c", config, "-o", str(root), "--no-evidence", "--quiet"], standalone_mode=False)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"the build ended with exit code {error.code}") from error
