"""Inputs in the format of a reader: each is a valid one with a few values replaced, such as a length, a path or a type.

A fuzzer that changes bytes seldom gets past the syntax. Here a tree is parsed, changed and written again, a header's
numbers are set to their limits, and pickles and templates are made of what attackers use. A number and a seed
determine a case, so it can be made again.
"""

from __future__ import annotations

import copy
import json
import pickletools
import random
import struct
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w

from benchmarks.fuzz.readers import inputs_of

OUTSIDE = "outside"
"""Name of a folder beside the one of a case. Nothing may be read or written there."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", " ", "0", "\0", "\ud800", "é", "a" * 5000, "%s%n", "{}", "__class__",
    f"../{OUTSIDE}/secret", f"../../{OUTSIDE}/secret", "/etc/passwd", "model.safetensors/../x", ".", "..", "C:\\x",
    [], {}, [[]], [None], {"": None}, [0] * 2000, {"a": {"a": {"a": {}}}},
)  # fmt: skip
NUMBERS = (0, 1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "messages", "cycler", "joiner", "namespace", "lipsum", "range", "dict", "self", "loop", "tools", "raise_exception",
    "strftime_now", "messages[0]", "''", "[]", "{}", "1", "none", "x", "(1).real",
)  # fmt: skip
ATTRIBUTES = (
    "__class__", "__mro__", "__subclasses__()", "__init__", "__globals__", "__builtins__", "_", "mro()", "format('x')",
    "items()", "append(1)", "update(x=1)", "content", "role", "join(',')", "replace('a', 'b' * 9)", "gi_frame",
)  # fmt: skip
FILTERS = ("tojson", "attr('__class__')", "map('attr', '__globals__')", "list", "format", "xmlattr", "indent(9)", "int",
           "center(10 ** 6)", "batch(3)", "pprint", "safe", "sort", "string", "trim", "first")  # fmt: skip


def case(name: str, number: int, seed: int = 0) -> bytes:
    """Returns one input for a reader; the same for the same number and seed."""
    chance = random.Random(f"{seed} {name} {number}")
    sources = [path for path in inputs_of(name) if not path.name.startswith("found-")]
    content = chance.choice(sources).read_bytes()
    return MAKERS[name](content, chance)


def changed_tree(tree: Any, chance: random.Random) -> Any:
    """Returns a tree of dicts, lists and values with one to three places changed."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return chance.choice(VALUES)
        holder, key = chance.choice(places)
        _change(holder, key, [other[index] for other, index in places], chance)
    return tree


def _change(holder: Any, key: Any, others: list[Any], chance: random.Random) -> None:
    match chance.randrange(6):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        case 3:
            holder[key] = copy.deepcopy(chance.choice(others))
        case 4 if isinstance(holder, dict):
            holder[str(chance.choice(VALUES))[:100]] = holder.pop(key)
        case 5 if isinstance(holder[key], list | str) and holder[key]:
            holder[key] = holder[key] * chance.choice((2, 500))
        case _:
            del holder[key]


def _places(tree: Any) -> Any:
    """All (dict or list, key) of a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from _places(value)


def _json(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.05:
        return b"[" * chance.choice((500, 5000)) + b"]" * chance.choice((500, 5000))
    return json.dumps(changed_tree(json.loads(content), chance)).encode()


def _toml(content: bytes, chance: random.Random) -> bytes:
    tree = changed_tree(tomllib.loads(content.decode()), chance)
    try:
        return tomli_w.dumps(tree).encode()
    except (TypeError, ValueError, AttributeError, RecursionError, OverflowError):  # TOML has no null, for example.
        return repr(tree).encode(errors="replace")


def _safetensors(content: bytes, chance: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    header = json.dumps(changed_tree(json.loads(content[8 : 8 + length]), chance)).encode()
    said = chance.choice((len(header), len(header), len(header), chance.choice(NUMBERS)))
    return struct.pack("<Q", said % 2**64) + header + content[8 + length :][: chance.choice((0, 7, 10**6))]


def _numbers(content: bytes, chance: random.Random) -> bytes:
    """Sets a few 4- or 8-byte numbers at places where a binary format has counts, lengths, types and offsets."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 3))):
        width, form = chance.choice(((4, "<I"), (8, "<Q")))
        place = chance.randrange(0, min(len(changed) - width, chance.choice((32, 400, len(changed)))))
        struct.pack_into(form, changed, place, chance.choice(NUMBERS) % 2 ** (8 * width))
    return bytes(changed)


def _pickle(content: bytes, chance: random.Random) -> bytes:
    """A call of a function, or a stored table with one operation repeated, left out or exchanged."""
    if chance.random() < 0.4:
        module, name = chance.choice(
            (("os", "system"), ("builtins", "exec"), ("subprocess", "Popen"), ("builtins", "open"), ("torch", "load"),
             ("torch.hub", "load"), ("numpy", "fromfile"), ("pathlib", "Path.unlink"), ("posix", "remove"))
        )  # fmt: skip
        argument = f"touch ../{OUTSIDE}/secret"
        called = f"c{module}\n{name}\n(V{argument}\ntR.".encode()
        return chance.choice((called, b"\x80\x02" + called, content[:-1] + called))
    operations = [(operation.name, place) for operation, _, place in pickletools.genops(content) if place is not None]
    (_, first), (_, second) = sorted(chance.sample(operations, 2), key=lambda found: found[1] or 0)
    part = content[first:second]
    return content[:first] + chance.choice((b"", part + part, part[::-1])) + content[second:]


def _template(_: bytes, chance: random.Random) -> bytes:
    def value(depth: int = 0) -> str:
        text = chance.choice(NAMES)
        for _ in range(chance.randrange(4)):
            text += chance.choice((f".{chance.choice(ATTRIBUTES)}", f"|{chance.choice(FILTERS)}", "[0]", "['content']"))
        if depth < 3 and chance.random() < 0.3:
            text = f"({text} {chance.choice(('+', '~', '*', 'in', '==', 'and', '%', '**'))} {value(depth + 1)})"
        return text

    def part(depth: int = 0) -> str:
        kind = chance.randrange(7 if depth < 3 else 2)
        inner = "" if kind < 2 else part(depth + 1)
        return (
            f"{{{{ {value()} }}}}",
            f"{{% set x = {value()} %}}",
            f"{{% if {value()} %}}{inner}{{% endif %}}",
            f"{{% for m in {value()} %}}{inner}{{% endfor %}}",
            f"{{% macro f(x={value()}) %}}{inner}{{% endmacro %}}{{{{ f({value()}) }}}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
            f"{{% set n = namespace(a={value()}) %}}{{% set n.a = {value()} %}}{inner}",
        )[kind]

    return "".join(part() for _ in range(chance.randrange(1, 5))).encode()


def _inference(content: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(content[:2], "big")
    body, rest = (content[2 : 2 + length], content[2 + length :]) if length else (content[2:], b"")
    changed = json.dumps(changed_tree(json.loads(body), chance)).encode()
    said = chance.choice((len(changed), len(changed), chance.randrange(2**16))) if length else 0
    return (said % 2**16).to_bytes(2, "big") + changed + rest


Maker = Callable[[bytes, random.Random], bytes]
MAKERS: Mapping[str, Maker] = {
    "manifest": _json,
    "report": _json,
    "configuration": _toml,
    "gguf": _numbers,
    "safetensors": _safetensors,
    "index": _json,
    "hugging_face": _json,
    "checkpoint": _pickle,
    "pt2": _json,
    "chat_request": _json,
    "completion_request": _json,
    "inference_request": _inference,
    "chat_template": _template,
}
