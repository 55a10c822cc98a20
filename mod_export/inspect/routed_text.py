"""Routes a text with the eager model: which layer ran which token, as a map and as lines for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mod_export.errors import UsageError
from mod_export.judge.inputs import Batch
from mod_export.judge.text import text_ids
from mod_export.model.model import Model, token_ids
from mod_export.report.figures.routing import MOST_TOKENS
from mod_export.rows.correctness import MapLayer, RoutingMap
from mod_export.types import Bucket

if TYPE_CHECKING:
    import numpy as np

RAN, SKIPPED, SEVERAL = "#", ".", "+"
NUMERALS = "0123456789abcdefghijklmnopqrstuvwxyz"
UNSEEN = "\N{MIDDLE DOT}"
WIDTH = 96
LEGEND = f"{RAN} ran, {SKIPPED} skipped"
LEGEND_OF_EXPERTS = f"; of experts the numbers of those that ran it, {SEVERAL} for more of them"
MOST_EXPERTS = 3
"""How many experts of one token are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedText:
    """The routing map of a text, and the source of the text.

    Attributes:
        source: "held-out text", "the text that was given", or the name of a file.
        left_out: number of tokens at the end of the text that do not fit into the map.
        map: the routing map. Its `bucket` is exactly as long as the routed text, because k is a share of that length.
    """

    source: str
    left_out: int
    map: RoutingMap


def routed_text(model: Model, text_or_file: str | None) -> RoutedText | None:
    """Runs the model on a text. Returns None if the model routes nothing, or no held-out text suits its vocabulary.

    Args:
        model: the model.
        text_or_file: the name of a file that holds a text, or else the text itself; None for a held-out sample.

    Raises:
        UsageError: the text is empty or cannot be read, or the model's ids do not represent text.
    """
    most = min(MOST_TOKENS, token_ids(model).max_positions)
    if text_or_file is None:
        sample_1S = text_ids(model, 1, most, 0)
        return None if sample_1S is None else _routed(model, sample_1S[0], "held-out text", 0)
    text, source = _read(text_or_file)
    ids_S = model.ids_of_text(text)
    if ids_S is None:
        raise UsageError(
            f"--text: this model's vocabulary of {token_ids(model).vocab_size:,} ids is not known to stand for text, "
            "so a text cannot be given to it; leave --text out"
        )
    if len(ids_S) == 0:
        raise UsageError(f"--text: {source} is empty; give at least one character")
    return _routed(model, ids_S[:most], source, max(0, len(ids_S) - most))


def _read(text_or_file: str) -> tuple[str, str]:
    if not _names_a_file(text_or_file):
        return text_or_file, "the text that was given"
    try:
        # Accepts any bytes: those that are not UTF-8 survive a round trip.
        return Path(text_or_file).read_bytes().decode(errors="surrogateescape"), text_or_file
    except OSError as error:
        raise UsageError(f"--text: {text_or_file}: cannot be read ({error.strerror})") from error


def _names_a_file(text_or_file: str) -> bool:
    try:
        return Path(text_or_file).is_file()
    except (OSError, ValueError):
        return False  # A text that is too long for a file name, or contains a null character.


def _routed(model: Model, ids_S: np.ndarray, source: str, left_out: int) -> RoutedText | None:
    import numpy as np

    from mod_export.judge.reference import Reference, routing_map

    batch = Batch.of_tokens("text", ids_S[None], np.array([len(ids_S)], dtype=np.int64))
    routing = routing_map(Reference(model), Bucket(1, len(ids_S)), [batch])
    if routing is None:
        return None
    return RoutedText(source=source, left_out=left_out, map=RoutingMap.model_validate(routing))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLane:
    """One mark for each token of the text: for a routing site, or for the n-th expert of each token in a layer.

    Attributes:
        name: name of the site; empty if the lane continues the experts of the lane above.
        marks: RAN or SKIPPED for each token; in a lane of experts a numeral, SKIPPED, or SEVERAL.
        experts: whether this is a lane of experts.
    """

    name: str
    marks: str
    experts: bool


def lanes_of(routing_map: RoutingMap) -> tuple[TokenLane, ...]:
    """Returns the lanes in the order of the model. The experts of a layer share as many lanes as a token has experts,
    up to `MOST_EXPERTS`.
    """
    count = len(routing_map.tokens)
    grouped: dict[str, list[MapLayer]] = {}
    for layer in routing_map.layers:
        number, _, part = str(layer.layer).partition(".")
        part = "experts" if part.startswith("expert") else part
        grouped.setdefault(f"layer {number} {part}".rstrip(), []).append(layer)
    lanes: list[TokenLane] = []
    for name, sites in grouped.items():
        if not name.endswith("experts"):
            lanes.append(TokenLane(name=name, marks=_ran(sites[0], count), experts=False))
            continue
        for index, marks in enumerate(_experts(sites, count)):
            lanes.append(TokenLane(name="" if index else name, marks=marks, experts=True))
    return tuple(lanes)


def token_marks(routing_map: RoutingMap) -> str:
    """Returns one character for each token: its first one, or a middle dot if that is not printable."""
    return "".join(text[0] if text and text[0].isprintable() else UNSEEN for text in routing_map.tokens)


def lane_lines(routed: RoutedText) -> list[str]:
    """Returns the map for a terminal: pieces of the text, and the marks of every lane under each piece."""
    lanes, tokens = lanes_of(routed.map), token_marks(routed.map)
    legend = LEGEND + (LEGEND_OF_EXPERTS if any(lane.experts for lane in lanes) else "")
    cut = f", {routed.left_out:,} more are left out" if routed.left_out else ""
    width = max(len(lane.name) for lane in lanes)
    lines = [f"routing of {routed.source}: {len(tokens):,} tokens{cut}", legend]
    for start in range(0, len(tokens), WIDTH):
        piece = slice(start, start + WIDTH)
        lines += ["", f"{start:>{width},}  {tokens[piece]}".rstrip()]
        lines += [f"{lane.name:<{width}}  {lane.marks[piece]}" for lane in lanes]
    return lines


def _ran(layer: MapLayer, count: int) -> str:
    ran = set(layer.routed)
    return "".join(RAN if position in ran else SKIPPED for position in range(count))


def _experts(sites: list[MapLayer], count: int) -> list[str]:
    """Marks of each lane. Lane n holds the n-th expert of each token, in order of expert numbers."""
    ran_by: list[list[str]] = [[] for _ in range(count)]
    for layer in sites:
        number = int(str(layer.layer).rpartition("expert")[2])
        for position in layer.routed:
            ran_by[position].append(NUMERALS[number] if number < len(NUMERALS) else RAN)
    most = min(MOST_EXPERTS, max(1, *(len(experts) for experts in ran_by)))
    return ["".join(_nth(experts, n, most) for experts in ran_by) for n in range(most)]


def _nth(experts: list[str], n: int, most: int) -> str:
    if n == most - 1 and len(experts) > most:
        return SEVERAL
    return experts[n] if n < len(experts) else SKIPPED
