"""The frame of every page of mod-export: self-contained, no network, the reader's own fonts, one small script.

The template engine escapes text. The content security policy allows the page's own styles and the one script whose hash
it names. Everything can be read without the script, which lets a reader point at a sample or a token.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from mod_export.benchmark.cost import PARTS
from mod_export.report.charts import NAMES, part_class, part_text
from mod_export.report.summary import agreement_by_input
from mod_export.report.wording import (
    agreement_text,
    bytes_text,
    ci_text,
    count_text,
    error_text,
    flops_text,
    interval_text,
    ms_text,
    percent_text,
    printable,
    ratio_interval_text,
    ratio_text,
    setting_text,
    share_text,
    threads_text,
    token_text,
    value_text,
    verdicts_text,
)

__all__ = ["light_colours", "render_page"]

DARK = "@media screen and (prefers-color-scheme: dark)"


def render_page(package: str, template: str, **values: Any) -> str:
    """A page of `template`, a file of `package` that extends shell.html.j2 and gets `values`."""
    return _template(package, template).render(**_shell(), **values).lstrip() + "\n"


def light_colours() -> Mapping[str, str]:
    """Name -> #rrggbb or #rgb of the style sheet, for light paper: figures outside of a page look like those on it."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", _part("page.css").split(DARK)[0]))


def _shell() -> dict[str, Any]:
    script = _part("page.js")
    return {
        "style": Markup(_part("page.css")),  # noqa: S704 - a file of this package.
        "script": Markup(script),  # noqa: S704 - a file of this package.
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _part(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _template(package: str, name: str) -> Template:
    return _environment().from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )
    environment.globals |= {"models": NAMES, "parts": list(PARTS)}
    environment.filters |= {
        "agreement": agreement_text,
        "by_input": agreement_by_input,
        "bytes": bytes_text,
        "ci": ci_text,
        "count": count_text,
        "error": error_text,
        "flops": flops_text,
        "interval": interval_text,
        "ms": ms_text,
        "part": part_text,
        "part_class": part_class,
        "percent": percent_text,
        "ratio": ratio_text,
        "ratio_interval": ratio_interval_text,
        "setting": setting_text,
        "share": share_text,
        "thousands": "{:,}".format,
        "threads": threads_text,
        "token": token_text,
        "value": value_text,
        "verdicts": verdicts_text,
    }
    return environment


def _cleaned(value: Any) -> Any:
    """Takes control characters and the like out of what came from outside; markup of our own passes."""
    return printable(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value
