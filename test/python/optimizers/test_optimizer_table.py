"""docs/optimizers.md: the bytes per parameter of torch's optimizers. test_optimizer_packages.py has the others."""

import pytest
from models import optimizer_table


def test_the_page_has_these_rows():
    names = list(optimizer_table.shown())
    assert names[1:] == list(optimizer_table.ROWS), names  # after the head


@pytest.mark.parametrize("name", optimizer_table.rows_of_torch())
def test_the_page_has_the_bytes(name):
    optimizer_table.check_row(name)
