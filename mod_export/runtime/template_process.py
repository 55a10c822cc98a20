"""Renders chat templates in a process of its own, within limits of time and memory.

jinja2's sandbox keeps a template from Python's objects, but not from loops that take days, from `"a" * 10**10`, or from
`9**99999999`, which it computes when it reads the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mod_export.errors import ModExportError
from mod_export.runtime.limited_process import (
    ClosedError,
    DiedError,
    LimitedProcess,
    NotStartedError,
    TooLargeError,
    TooSlowError,
    answer_questions,
)

RENDER_S = 5.0
"""How many seconds a template may take. Those of models take a millisecond."""
MOST_BYTES = 1 << 29
"""How much memory the templates of a model may take."""
NOT_RENDERED = "the model's chat template is not rendered: the process that would do it"
MOST_CHARACTERS = 1 << 24
"""How long a rendered conversation may be: longer than the text of any request."""


class NoTextError(Exception):
    """A template was not rendered, because it is invalid or failed; the message says why."""


class TooSlowTextError(NoTextError):
    """A template took too long. The cause may be a busy machine, so a later attempt may succeed."""


class TemplateNotRenderedError(ModExportError):
    """A template was not rendered, for a reason that is not in the template."""


def template_process() -> LimitedProcess:
    """Returns the process that renders the templates of one model."""
    return LimitedProcess(__name__)


def rendered(process: LimitedProcess, sources: Mapping[str, str], name: str, context: Mapping[str, Any] | None) -> str:
    """Renders a template in the process, whose templates are always the same.

    Args:
        process: renders templates. One thread may use it at a time.
        sources: all templates, by name.
        name: the template to be rendered.
        context: plain data for its variables; if None, the template is only compiled, and the result is empty.

    Raises:
        NoTextError: the template is invalid, failed, or went beyond a limit.
        TemplateNotRenderedError: there is no process, or somebody else ended it.
    """
    try:
        answer = process.ask({"name": name, "context": context}, lambda: sources, RENDER_S, MOST_BYTES)
    except TooSlowError as error:
        raise TooSlowTextError(f"it took longer than {RENDER_S:g} s") from error
    except TooLargeError as error:
        raise NoTextError(f"it took more than {MOST_BYTES >> 20} MiB of memory") from error
    except DiedError as error:
        raise TemplateNotRenderedError(f"{NOT_RENDERED} ended ({error}); try again") from error
    except NotStartedError as error:
        raise TemplateNotRenderedError(f"{NOT_RENDERED} {error}") from error
    except ClosedError as error:
        raise TemplateNotRenderedError(f"{NOT_RENDERED} is closed") from error
    if "error" in answer:
        raise NoTextError(answer["error"])
    return str(answer["text"])


# In the other process.


def renderer(sources: Mapping[str, str]) -> Callable[[dict[str, Any]], dict[str, str]]:
    """Returns a function that answers the questions of `rendered` with a text or an error."""
    read: dict[str, jinja2.Template] = {}

    def answer(question: dict[str, Any]) -> dict[str, str]:
        name, context = question["name"], question["context"]
        try:
            if name not in read:
                read[name] = _environment().from_string(sources[name])
            text = "" if context is None else read[name].render(context)
        except MemoryError:
            raise
        except Exception as error:  # A template is a program: it may raise any exception.
            return {"error": str(error)}
        if len(text) > MOST_CHARACTERS:
            return {"error": f"it wrote more than {MOST_CHARACTERS:,} characters"}
        return {"text": text}

    return answer


class _Generation(Extension):
    """Renders the content of `{% generation %}`, which marks answers for training, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it this way.

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """jinja2's `dict`, without the methods of a type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja2's namespace, but without names that begin with an underscore: the sandbox does not check them here."""

    def __init__(*args: Any, **values: Any) -> None:  # A template may set a name `self`.
        self, *mappings = args
        values = dict(*mappings, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no names that begin with an underscore, got {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja2's own `tojson` escapes HTML characters.
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    answer_questions(renderer)
