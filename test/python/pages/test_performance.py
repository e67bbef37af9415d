"""The tables of docs/performance.md and bench/README.md: git has them as the data file says, whose numbers are recorded."""

import json
import re
import runpy
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(CHECKOUT / "docs" / "performance_tables.py"))
TABLES = json.loads(SCRIPT["DATA"].read_text())["tables"]
ROWS = [(name, row) for name, table in TABLES.items() for row in table["rows"]]
COUNTS = ("one", "two", "four")


def lines_of(source, beginning):
    found = [line for line in (CHECKOUT / source).read_text().splitlines() if line.startswith(beginning)]
    assert found, f"no line of {source} begins with {beginning}"
    return found


def recorded(row):
    places = [(row["source"], line) for line in row["lines"]]
    places += [(also["source"], also["line"]) for also in row.get("also", ())]
    return "\n".join(line for place in places for line in lines_of(*place))


def figures(row, heads):
    """Numbers of the cells after the first, but for goals."""
    for head, cell in list(zip(heads, row["cells"]))[1:]:
        if head != "goal":
            yield from re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"`[^`]*`|bf16", "", cell))


@pytest.mark.parametrize(
    "name, row", ROWS, ids=lambda value: value if isinstance(value, str) else value["cells"][0]
)
def test_each_number_is_recorded(name, row):
    numbers = list(figures(row, TABLES[name]["heads"]))
    text = recorded(row)
    assert numbers
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", text), (
            f"{number} is not on these lines:\n{text}"
        )


@pytest.mark.parametrize(
    "name, row", ROWS, ids=lambda value: value if isinstance(value, str) else value["cells"][0]
)
def test_a_row_says_gpus_and_date(name, row):
    file = Path(row["source"]).name
    assert file.startswith(row["date"])
    count, gpu = row["gpus"].split()
    assert count in COUNTS and gpu in (CHECKOUT / row["source"]).read_text()


@pytest.mark.parametrize("page", SCRIPT["pages"](), ids=lambda file: file.name)
def test_pages_have_the_tables_of_the_data(page):
    assert page.read_text() == SCRIPT["pages"]()[page], "run docs/performance_tables.py"


def test_each_table_is_on_its_page():
    for name, table in TABLES.items():
        assert f"<!-- table: {name} -->" in (CHECKOUT / table["page"]).read_text()


def test_a_number_that_is_not_recorded_is_found():
    name, row = ROWS[0]
    other = {**row, "cells": [cell.replace("206.1", "206.2") for cell in row["cells"]]}
    with pytest.raises(AssertionError, match="206.2 is not on these lines"):
        test_each_number_is_recorded(name, other)


def test_a_page_with_another_number_is_found():
    text = next(iter(SCRIPT["pages"]().values())).replace("0.83 to 0.98", "0.80 to 0.98")
    tables = {name: SCRIPT["table_of"](table) for name, table in TABLES.items()}
    assert SCRIPT["written"](text, tables) != text
