"""What pages share."""

from __future__ import annotations

import re

from mod_export.report.charts import COLOURED_PARTS
from mod_export.report.pages import light_colours


def test_every_part_has_a_colour_on_light_paper() -> None:
    colours = light_colours()
    assert {part: bool(re.fullmatch("#[0-9a-f]{6}", colours[part])) for part in COLOURED_PARTS} == dict.fromkeys(
        COLOURED_PARTS, True
    )
    assert len({colours[part] for part in COLOURED_PARTS}) == len(COLOURED_PARTS)
    assert colours["card"] == "#fff"
