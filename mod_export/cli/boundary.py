"""The one place where errors become text and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from mod_export import __version__
from mod_export.errors import ModExportError

__all__ = ["GATE_FAILED", "command"]

GATE_FAILED = 4
INTERRUPTED = 130
UNREAD = 141
RESUME = ("build", "demo", "sweep")
BUG = 1


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Turns errors into messages and exit codes, and the function's result into the exit code."""

    @wraps(function)
    def wrapped(**arguments: Any) -> None:
        verbose = bool(arguments.get("verbose"))
        try:
            code = function(**arguments)
            sys.stdout.flush()
        except ModExportError as error:
            if verbose:
                traceback.print_exc()
            lines = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
            click.echo("\n".join(["error: " + lines[0], *(f"       {line}" for line in lines[1:])]), err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            resumes = "; what was whole is kept, and the same command resumes there"
            click.echo("interrupted" + (resumes if function.__name__ in RESUME else ""), err=True)
            code = INTERRUPTED
        except BrokenPipeError:
            # `mod-export report DIR | head`: what is still buffered must not fail again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = UNREAD
        except Exception as error:  # The one broad except: whatever else arrives here is our bug, and says so.
            traceback.print_exc()
            click.echo(
                f"bug in mod-export {__version__}: {type(error).__name__}; please report the text above", err=True
            )
            code = BUG
        sys.exit(code)

    return wrapped
