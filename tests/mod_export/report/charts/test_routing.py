from __future__ import annotations

import math

from mod_export.report import BuildReport
from mod_export.report.charts.routing import MOST_TOKENS, SHADES, token_maps
from mod_export.report.parity_entries import MapLayer, RoutingMap


def map_of(tokens: int, *routed: tuple[int, ...]) -> RoutingMap:
    layers = tuple(
        MapLayer(layer=2 * index + 1, k=len(one), routed=one, scores=tuple(float(i) for i in range(tokens)))
        for index, one in enumerate(routed)
    )
    return RoutingMap(bucket="b1s8", tokens=tuple("abcdefgh" * (tokens // 8))[:tokens], layers=layers)


def test_each_token_knows_the_layers_that_ran_it() -> None:
    (one,) = token_maps([map_of(8, (0, 1, 5), (1, 7))])
    assert [token.layers for token in one.tokens] == [(1,), (1, 3), (), (), (), (1,), (), (3,)]
    assert [token.shade for token in one.tokens] == [2, SHADES, 0, 0, 0, 2, 0, 2]
    assert one.never == 4
    assert one.tokens[3].scores == (3.0, 3.0)


def test_lanes_hold_every_routed_position() -> None:
    (one,) = token_maps([map_of(8, (0, 1, 5), ())])
    assert one.lanes[0].path == "M0 0h2v1h-2zM5 0h1v1h-1z"
    assert (one.lanes[0].shown, one.lanes[1].path) == (3, "")


def test_a_long_text_is_cut_and_counted() -> None:
    count = MOST_TOKENS + 8
    (one,) = token_maps([map_of(count, (0, count - 1))])
    assert (len(one.tokens), one.total, one.never) == (MOST_TOKENS, count, count - 2)
    assert one.lanes[0].shown == 1


def test_missing_scores_are_not_made_up() -> None:
    short = map_of(8, (0, 7))
    layer = short.layers[0].model_copy(update={"scores": (0.5,)})
    (one,) = token_maps([short.model_copy(update={"layers": (layer,)})])
    assert one.tokens[0].scores == (0.5,)
    assert math.isnan(one.tokens[7].scores[0])


def test_a_map_without_tokens_is_none(report: BuildReport) -> None:
    assert token_maps([RoutingMap(bucket="b", tokens=(), layers=())]) == ()
    assert [one.total for one in token_maps(report.routing_maps)] == [128]


def test_a_model_without_routed_layers_has_plain_tokens() -> None:
    (one,) = token_maps([map_of(8)])
    assert {token.shade for token in one.tokens} == {0}
