"""docs/models.md has a row for each family that is tried."""

import re

from decoder_families import FAMILIES, SEEING
from model_table import PAGE, table_of


def test_the_table_has_a_row_for_each_family() -> None:
    assert tuple(re.findall(r"^\| `(\S+)` \|", table_of(PAGE.read_text()), re.MULTILINE)) == FAMILIES + SEEING
