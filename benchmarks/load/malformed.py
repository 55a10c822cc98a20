"""Random requests, wrong in all ways seen from clients so far, and the check that a refusal has the right shape."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.load.raw_client import Reply, request_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIELDS = (
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "stream_options",
    "ignore_eos", "echo", "logprobs", "add_special_tokens", "best_of", "suffix", "presence_penalty", "logit_bias",
    "tools", "response_format", "user",
)  # fmt: skip
CHAT_FIELDS = ("messages", "max_completion_tokens", "top_logprobs", "logprobs", "chat_template_kwargs", "tool_choice")
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 20, 21, 0.5, -0.0, 1e-320, 1e308, 1.5, 255, 256, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63), 10**400, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    "",
    "a",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\U0001f600",
    "a" * 2000,
    "null",
    "1",
    "\r\n\r\n",
    "{{ x }}",
    "é" * 300,
)
DTYPES = ("INT64", "INT32", "UINT64", "UINT8", "BOOL", "FP16", "FP32", "FP64", "BYTES", "BF16", "", "int64")
LENGTH = "Inference-Header-Content-Length"
SHAPE = {"message": str, "type": str, "param": (str, type(None)), "code": (str, type(None))}


class Case(NamedTuple):
    """A request.

    Attributes:
        kind: the kind of error in it.
        path: the path that it is sent to.
        sent: all bytes of the request.
        refused: whether the server must refuse it; without it, a random request may happen to be valid.
    """

    kind: str
    path: str
    sent: bytes
    refused: bool = False


def cases(rng: random.Random, count: int, model: str) -> list[Case]:
    """Returns `count` requests, each of a random kind."""
    kinds: list[Callable[[random.Random, str], Case]] = [
        _values, _values, _values, _values, _chat, _not_json, _bytes, _nested, _prompts, _unknown, _content_type,
        _origins, _addresses, _tensors, _tensors, _tensors, _binary, _binary,
    ]  # fmt: skip
    return [rng.choice(kinds)(rng, model) for _ in range(count)]


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Returns a random JSON value."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice([None, True, False])
    if kind == 5:
        return {str(junk(rng, 3))[:40]: junk(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [junk(rng, depth + 1) for _ in range(rng.randrange(5))]


def encoded(value: Any) -> bytes:
    """JSON that may also have NaN, which JSON does not allow, and escaped halves of surrogate pairs."""
    return json.dumps(value).encode()


def _post(kind: str, path: str, body: bytes, *, refused: bool = False, **headers: str) -> Case:
    return Case(kind, path, request_bytes("POST", path, body, headers), refused)


def _values(rng: random.Random, model: str) -> Case:
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
    for _ in range(rng.randrange(1, 4)):
        asked[rng.choice(FIELDS)] = junk(rng)
    # A request that happens to be valid must not take long.
    if isinstance(asked.get("max_tokens"), int) and asked["max_tokens"] > 20:
        asked["ignore_eos"] = "no"
    return _post("values", COMPLETIONS, encoded(asked))


def _chat(rng: random.Random, model: str) -> Case:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for _ in range(rng.randrange(1, 3)):
        asked[rng.choice((*CHAT_FIELDS, "max_tokens", "n"))] = junk(rng)
    if rng.random() < 0.5:
        asked["messages"] = [{"role": junk(rng, 2), "content": junk(rng), "tool_calls": junk(rng, 2)}]
    return _post("conversations", CHAT, encoded(asked))


def _not_json(rng: random.Random, model: str) -> Case:
    whole = encoded({"prompt": "abc", "max_tokens": 2})
    body = rng.choice([
        b"", whole[: rng.randrange(len(whole))], whole + b"}", b"[]", b"null", b"3", b'"text"', b"{'prompt': 'a'}",
        b'{"prompt": "a", }', b'{"prompt": "\\u12"}', b'{"prompt": 01}', whole.replace(b":", b"=", 1),
        b"\xef\xbb\xbf" + whole[:-1], whole.decode().encode("utf-16"),
    ])  # fmt: skip
    return _post("not JSON", rng.choice([COMPLETIONS, CHAT]), body, refused=True)


def _bytes(rng: random.Random, model: str) -> Case:
    bad = rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00", rng.randbytes(20) + b"\xff"])
    body = rng.choice([b'{"prompt": "%s", "max_tokens": 2}' % bad, bad, b'{"%s": 1, "prompt": "a"}' % bad])
    return _post("bytes that are no text", COMPLETIONS, body, refused=True)


def _nested(rng: random.Random, model: str) -> Case:
    depth = rng.choice([50, 200, 1000, 5000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a": ', b"}")])
    inside = opening * depth + b"1" + closing * depth if rng.random() < 0.7 else opening * depth
    field = rng.choice([b"prompt", b"stop", b"logit_bias", b"chat_template_kwargs", b"messages", b"tools"])
    body = inside if rng.random() < 0.2 else b'{"max_tokens": 2, "prompt": "a", "%s": %s}' % (field, inside)
    return _post("nesting", rng.choice([COMPLETIONS, CHAT]), body, refused=True)


def _prompts(rng: random.Random, model: str) -> Case:
    prompt = rng.choice([
        [], [[]], [[1], []], ["a", []], [1, "a"], [1.0], [True], [-1], [256], [2**63], [10**30], [None], {}, 3, None,
        "", [""], "\ud800", "a" * 100_000, [1] * 50_000, ["a"] * 500, [[1]] * 500, [[1, [2]]],
    ])  # fmt: skip
    return _post("prompts", COMPLETIONS, encoded({"prompt": prompt, "max_tokens": 2}), refused=prompt not in ([256],))


def _unknown(rng: random.Random, model: str) -> Case:
    name = rng.choice(["x", "", "__class__", "Prompt", "max_token", "\ud800", "a" * 5000, "self", "model_config"])
    return _post(
        "unknown fields", COMPLETIONS, encoded({"prompt": "a", "max_tokens": 2, name: junk(rng) or 1}), refused=True
    )


def _content_type(rng: random.Random, model: str) -> Case:
    mime = rng.choice(["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json",
                       "application/jsonx", "application/octet-stream", "\xe9", ";", "a" * 5000])  # fmt: skip
    body = encoded({"prompt": "a", "max_tokens": 2})
    return _post("content types", rng.choice([COMPLETIONS, CHAT]), body, **{"Content-Type": mime})


def _origins(rng: random.Random, model: str) -> Case:
    """Requests as a browser sends them for a page from another origin."""
    origin = rng.choice(
        ["http://example.com", "null", "https://127.0.0.1:1", "http://127.0.0.1.example.com", "\xe9", "x"]
    )
    body = encoded({"prompt": "a", "max_tokens": 2})
    return _post("origins", rng.choice([COMPLETIONS, CHAT]), body, refused=True, Origin=origin)


def _addresses(rng: random.Random, model: str) -> Case:
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    path = rng.choice([
        "/v1", "/v1/", "/v1/models/x", "/v1/models/%ff%fe", "/v1/models/", "/v1/completions/", "/v1/%2e%2e/etc/passwd",
        "//", "/v3", "/v2/models/x", f"/v2/models/{model}/versions/2", f"/v2/models/{model}/infer/x", "/v2/models/%00",
        "/v2/" + "a" * 3000, "/metrics/x", "/v2/models//infer",
    ])  # fmt: skip
    return Case("addresses", path, request_bytes(method, path, b"{}"), True)


def _tensors(rng: random.Random, model: str) -> Case:
    shape = rng.choice([[1, 3], [3], [1, 1, 3], [], [0], [1, 0], [-1, 3], [2**40, 2**40], [1, 2**62], [1] * 9, [1] * 8,
                        "3", [1.5, 2], [1, 4096], [4096, 1], [1, "3"], None])  # fmt: skip
    data = rng.choice([[1, 2, 3], [[1, 2, 3]], [1, 2], [[1], [2, 3]], [], None, "abc", [None] * 3, ["1", "2", "3"],
                       [1.0, 2.5, 3.0], [True, False, True], [-1, 2, 3], [256, 2, 3], [10**30, 1, 2], [math.nan, 1, 2],
                       [math.inf, 1, 2], [1] * 4096, [{}, [], 1], [2**63, 2**64, -1], [1e400, 1, 1]])  # fmt: skip
    name = rng.choice(["input_ids", "input_ids", "lengths", "x", "", None, 3])
    tensor: dict[str, Any] = {"name": name, "shape": shape, "datatype": rng.choice(DTYPES), "data": data}
    if rng.random() < 0.1:
        tensor.pop(rng.choice(list(tensor)))
    if rng.random() < 0.1:
        tensor["parameters"] = junk(rng)
    inputs: list[Any] = [tensor]
    if rng.random() < 0.3:
        inputs.append({"name": "lengths", "shape": rng.choice([[1], [2], [], [1, 1]]), "datatype": rng.choice(DTYPES),
                       "data": rng.choice([[3], [0], [-1], [4], [2**40], [1.5], [3, 3]])})  # fmt: skip
    asked: dict[str, Any] = {"inputs": rng.choice([inputs, inputs, inputs, [], None, junk(rng), inputs * 3])}
    if rng.random() < 0.2:
        asked[rng.choice(["outputs", "id", "parameters"])] = junk(rng)
    return _post("tensors", f"/v2/models/{model}/infer", encoded(asked))


def _binary(rng: random.Random, model: str) -> Case:
    numbers = rng.choice([[1, 2, 3], [-1, 2, 3], [1, 2], [], [256, 0, 0]])
    blob = struct.pack(f"<{len(numbers)}q", *numbers) + rng.choice([b"", b"", b"x", rng.randbytes(100)])
    size = rng.choice([24, 24, 24, 0, -1, 23, 25, 2**63, 10**30, "24", None, 24.0, True, [24]])
    shape, datatype = rng.choice([[1, 3], [1, 3], [3], [1, 2**40], [0]]), rng.choice(["INT64", "INT64", *DTYPES])
    parameters = {"binary_data_size": size}
    tensor = {"name": "input_ids", "shape": shape, "datatype": datatype, "parameters": parameters}
    head = encoded({"inputs": [tensor]})
    length = rng.choice(
        [str(len(head))] * 4 + ["0", "-1", "x", "", "9" * 40, "1e3", str(len(head) - 1), "\xb2", "0x10"]
    )
    headers = {LENGTH: length, "Content-Type": "application/octet-stream"}
    return _post("binary tensors", f"/v2/models/{model}/infer", head + blob, **headers)


def problem(case: Case, reply: Reply) -> str:
    """Returns the error in an answer, or an empty text if it is right."""
    status = reply.status
    if not case.refused and status == 200:
        return ""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        answer = reply.json()
    except ValueError:
        return f"status {status}, a body that is no JSON: {reply.body[:80]!r}"
    if case.path.startswith("/v2"):
        right = isinstance(answer, dict) and answer.keys() == {"error"} and isinstance(answer["error"], str)
    else:
        error = answer.get("error") if isinstance(answer, dict) else None
        right = isinstance(error, dict) and answer.keys() == {"error"} and error.keys() == SHAPE.keys()
        right = right and all(isinstance(error[name], kinds) for name, kinds in SHAPE.items())
    return "" if right else f"status {status}, an error of another shape: {reply.body[:120]!r}"
