"""The GPT-3 table of docs/look-up/gpt3-table.md is what `samerun plan` says today."""

from __future__ import annotations

import pytest
from processes import REPOSITORY

from benchmarks import gpt3_table


@pytest.mark.slow
def test_a_line_of_the_page_is_what_is_planned_now() -> None:
    page = (REPOSITORY / "docs" / "look-up" / "gpt3-table.md").read_text().splitlines()
    (line,) = gpt3_table.lines("gpt3_125m", devices=(8,))
    assert line in page
    sizes = {line.split()[1] for line in page if line.startswith("| ") and line.count("|") == len(gpt3_table.PRESETS) + 5}
    assert sizes >= {recipe.removeprefix("gpt3_").replace("_", ".").upper() for recipe in gpt3_table.RECIPES}
