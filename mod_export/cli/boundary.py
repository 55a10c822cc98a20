"""Options that all commands share, and the single place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mod_export import __version__
from mod_export.errors import ModExportError, UnverifiedWarning, UsageError
from mod_export.model.hub import PREFIX

if TYPE_CHECKING:
    from mod_export.config import BuildConfig

BUG = 1
INTERRUPTED = 130
OUTPUT_CLOSED = 141
RESUMABLE = ("build", "demo", "sweep")


class _Path(click.Path):
    """A path that the operating system can look up. Each command decides whether it must exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        try:
            path.exists()
        except OSError as error:
            self.fail(f"{path}: {error.strerror}", param, ctx)
        return path


class _Source(_Path):
    """A MODEL argument of `mod-export build`: a path, FILE.py:FUNCTION, or a name on the Hugging Face hub."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).startswith(PREFIX):
            return str(value)  # A Path would drop a slash of hf://.
        return str(super().convert(value, param, ctx))


PATH, SOURCE = _Path(), _Source()
folder_argument = click.argument("folder", metavar="DIR", type=PATH)
trusted_keys_option = click.option(
    "--trusted-key", "trusted_keys", metavar="FILE", type=PATH, multiple=True,
    callback=lambda context, option, keys: keys or None,
    help="Public key in PEM: open the folder only if its owner has signed it; may be given several times.",
)  # fmt: skip
config_option = click.option(
    "-c", "--config", "config_file", metavar="CONFIG.toml", type=PATH, help="Configuration file."
)
target_option = click.option(
    "--target", "targets", metavar="T", multiple=True, help="Only this target; may be given several times."
)


def text_option(use: str, otherwise: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option that names a text to `use`, with what is read without it."""
    help_text = f"{use} this UTF-8 text, of which the first 4 MiB count; default: {otherwise}."
    return click.option("--text", "text_file", metavar="FILE", type=PATH, help=help_text)


def config_of(path: Path | None, targets: Sequence[str] = (), **overrides: Any) -> BuildConfig:
    """Returns the configuration of a file, or the default one, with the values that the command line replaces."""
    from mod_export.config import config_from_toml

    return config_from_toml(path, {**({"targets": tuple(targets)} if targets else {}), **overrides})


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Turns a function into the body of a command.

    The result of the function becomes the exit code. Its errors become a message and an exit code. The function
    receives `verbosity`: -1 with -q, 1 with -v, 0 otherwise.
    """

    @wraps(function)
    def wrapped(*, quiet: bool, verbose: bool, **arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_say_warning, warnings.showwarning)
            code = _exit_code(function, verbosity=-1 if quiet else int(verbose), **arguments)
        sys.exit(code)

    with_verbose = click.option("-v", "--verbose", is_flag=True, help="Name every step; tracebacks for errors.")
    with_quiet = click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
    return with_quiet(with_verbose(wrapped))


def _exit_code(function: Callable[..., int], *, verbosity: int, **arguments: Any) -> int:
    try:
        code = function(verbosity=verbosity, **arguments)
        sys.stdout.flush()
    except ModExportError as error:
        return _refused(error, verbosity)
    except KeyboardInterrupt:
        resumes = "; finished steps are kept, and the same command resumes after them"
        click.echo("interrupted" + (resumes if function.__name__ in RESUMABLE else ""), err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # For example `mod-export report DIR | head`: buffered output must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except ImportError as error:
        missing = _missing_package(error, function.__name__)
        return _bug(error) if missing is None else _refused(missing, verbosity)
    except Exception as error:  # Any other error is a bug of mod-export, and is reported as one.
        return _bug(error)
    return code


def _say_warning(
    show_default: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Shows our own warnings like the messages of a command, because a line of our code is no use to a user."""
    if issubclass(category, UnverifiedWarning):
        click.echo(f"warning: {message}", err=True)
    else:
        show_default(message, category, *where, **more)


def _missing_package(error: ImportError, name: str) -> UsageError | None:
    """Says which extra to install; None if the import that failed is not of an optional package."""
    from mod_export.environment import extra_of_import

    extra = extra_of_import(error)
    if extra is None:
        return None
    return UsageError(
        f"`mod-export {name}` needs {error.name}, which cannot be imported here ({error})\n"
        f'install it: pip install "mod-export[{extra}]"'
    )


def _refused(error: ModExportError, verbosity: int) -> int:
    if verbosity > 0:
        traceback.print_exc()
    lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
    click.echo("\n".join(["error: " + lines[0], *(f"       {line}" for line in lines[1:])]), err=True)
    return error.exit_code


def _bug(error: Exception) -> int:
    traceback.print_exc()
    click.echo(f"bug in mod-export {__version__}: {type(error).__name__}; please report the text above", err=True)
    return BUG
