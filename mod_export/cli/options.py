"""Options that several commands have, and the configuration that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mod_export.config import BuildConfig

__all__ = ["PATH", "config_of", "config_option", "folder_argument", "named_config", "target_option"]


class _Path(click.Path):
    """A path that the operating system can look up. Whether it has to exist is for each command to say."""

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


def config_of(path: Path | None, targets: Sequence[str] = (), **overrides: Any) -> BuildConfig:
    """The configuration of a file, or the default one, with the values that the command line replaces."""
    from mod_export.config import config_from_toml

    return config_from_toml(path, {**({"targets": tuple(targets)} if targets else {}), **overrides})


def named_config(name: str) -> BuildConfig:
    """A configuration that ships with mod-export."""
    from importlib.resources import files

    return config_of(Path(str(files("mod_export_configs").joinpath(f"{name}.toml"))))
