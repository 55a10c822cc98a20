"""Options that several commands have, and the configuration that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mod_export.config import BuildConfig

__all__ = ["PATH", "config_of", "config_option", "folder_argument", "quiet_option", "target_option", "verbose_option"]


class _Path(click.Path):
    """A path that the operating system can look up. Whether something has to be there is for each command to say."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        try:
            path.exists()
        except OSError as error:
            self.fail(f"{path}: {error.strerror}", param, ctx)
        return path


PATH = _Path()
folder_argument = click.argument("folder", metavar="DIR", type=PATH)
config_option = click.option(
    "-c", "--config", "config_file", metavar="CONFIG.toml", type=PATH, help="Configuration file."
)
target_option = click.option(
    "--target", "targets", metavar="T", multiple=True, help="Only this target; may be given several times."
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Name every step; tracebacks for errors.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")


def config_of(path: Path | None, targets: Sequence[str], **overrides: Any) -> BuildConfig:
    """The file's configuration, defaults without one, with what the command line says instead."""
    from mod_export.config import config_from_toml

    return config_from_toml(path, {**({"targets": tuple(targets)} if targets else {}), **overrides})
