r"""Checks JSON schemas for parts that llguidance would silently turn into a grammar of other texts. Such parts are
refused, or rewritten so that no such text is possible.

Texts hold no control characters except \b, \t, \n, \f and \r, because JSON has a single way to write these. llguidance
leaves the others out of `const`, `enum` and `pattern`, so `"a\u0007b"` would become `"ab"`. If a class of characters
has control characters but lacks the quote or the backslash, such as `[^"]`, llguidance lets the missing one match too.
And it counts a key that a text has twice as two properties.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mod_export.errors import GrammarError

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ESCAPE = re.compile(r"\\(?:[xuU]\{([0-9a-fA-F]{1,8})\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([av]))")
"""A character in a regular expression that is written as its code, or one of two control characters."""
NAMED_CONTROLS = re.compile(r"\\p(?:C|\{(?:C|Cc|cntrl|Control|Other)\})|\[:cntrl:\]")
PART = re.compile(rf"{ESCAPE.pattern}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.", re.DOTALL)
"""An escape, a class of characters, or a single character of a regular expression."""
ASCII = [chr(code) for code in range(128)]
QUOTED = {'"', "\\"}
NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by names."""
LONGEST_PATTERN = 1 << 14
"""Characters of the longest regular expression. Checking takes some microseconds for each class of characters."""
NO_SCHEMA = ("title", "description", "default", "examples", "$comment", "required", "$ref", "x-guidance")


def checked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema in a form that llguidance reads correctly.

    Raises:
        GrammarError: llguidance would read a part of it as something else.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("const", "enum"):
            _check_value(value, key)
            result[key] = value
        elif key == "pattern" and isinstance(value, str):
            result[key] = _pattern(value, key)
        elif key in NAMES and isinstance(value, Mapping):
            patterns = key == "patternProperties"
            result[key] = {_pattern(name, key) if patterns else name: _checked(part) for name, part in value.items()}
        else:
            result[key] = value if key in NO_SCHEMA else _checked(value)
    _check_counts(schema)
    return result


def _checked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return checked(value)
    return [_checked(item) for item in value] if isinstance(value, list | tuple) else value


def _check_value(value: Any, key: str) -> None:
    """Refuses control characters in texts, but not in names of properties, which llguidance escapes."""
    if isinstance(value, str):
        _refuse(CONTROL.search(value), key)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_value(item, key)


def _refuse(control: re.Match[str] | None, key: str) -> None:
    if control is not None:
        raise GrammarError(
            f"{key}: demands the control character U+{ord(control[0]):04X}, which no text of a grammar has; "
            r"only \b, \t, \n, \f and \r are supported"
        )


def _pattern(pattern: str, key: str) -> str:
    if len(pattern) > LONGEST_PATTERN:
        raise GrammarError(f"{key}: has {len(pattern)} characters, at most {LONGEST_PATTERN} are read; simplify it")
    if NAMED_CONTROLS.search(pattern):
        raise GrammarError(f"{key}: a class of control characters is not supported; leave it out")
    return "".join(_part(part[0], key) for part in PART.finditer(pattern))


def _part(part: str, key: str) -> str:
    """Returns a part of a regular expression (`PART`) in a form that llguidance reads correctly."""
    if not (part.startswith("[") and len(part) > 1):
        _refuse(CONTROL.fullmatch(_plain(part)), key)
        return part
    try:
        kind = re.compile(ESCAPE.sub(lambda escape: re.escape(_plain(escape[0])), part))
    except re.error:  # Syntax that only llguidance's regular expressions have.
        return part
    matches = {character for character in ASCII if kind.fullmatch(character)}
    controls = {character for character in matches if CONTROL.fullmatch(character)}
    negated = part.startswith("[^")
    if not controls or matches >= QUOTED:
        return part
    if negated:
        return rf"[^\x00-\x1f\x7f{part[2:]}"
    raise GrammarError(
        f"{key}: the class {part[:80]} has control characters, of which only "
        r"\b, \t, \n, \f and \r are supported; leave the others out"
    )


def _plain(part: str) -> str:
    """Returns the character that an escape stands for, or the part as it is."""
    escape = ESCAPE.fullmatch(part)
    if escape is None:
        return part
    if escape[5]:
        return {"a": "\a", "v": "\v"}[escape[5]]
    code = int(next(digits for digits in escape.groups() if digits), 16)
    return chr(code) if code < 0x110000 else part


def _check_counts(schema: Mapping[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required", [])
    if not isinstance(least, int | float) or not isinstance(required, list | tuple):
        return
    free = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if free and least > len(required) + 1:
        raise GrammarError(
            f"minProperties: {least} with names that are not listed is not supported, because one name could be "
            "written several times; list the names in properties and required, with additionalProperties false"
        )
