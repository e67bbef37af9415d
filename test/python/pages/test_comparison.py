"""docs/comparison.md: a cell has a source, a source has a date, and some rows say where others are better."""

import importlib.util
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
PAGE = CHECKOUT / "docs" / "comparison.md"


@pytest.fixture(scope="module")
def sources():
    spec = importlib.util.spec_from_file_location("check_sources", CHECKOUT / ".ci" / "check_sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_cell_has_a_dated_source(sources):
    text = PAGE.read_text()
    assert not [*sources.unsourced(text, PAGE.parent), *sources.undated(text)]


TABLE = "| | qshard | other |\n|---|---|---|\n| row | [yes](limits.md) | {cell} |\n\n{defined}\n"
GOOD = '[a]: https://github.com/o/r/blob/' + "0" * 40 + '/f.py "2026-08-22"'


@pytest.mark.parametrize(
    "cell, defined, problem",
    [
        ("yes", GOOD, "no source"),
        ("[yes][b]", GOOD, "b is not defined"),
        ("[yes](gone.md)", GOOD, "no page gone.md"),
        ("[yes][a]", GOOD.replace(' "2026-08-22"', ""), "no date"),
        ("[yes][a]", GOOD.replace("08-22", "02-31"), "no date"),
        ("[yes][a]", GOOD.replace("2026", "2926"), "yet to come"),
        ("[yes][a]", GOOD.replace("0" * 40, "main"), "no commit"),
        ("not known", GOOD, "a is not used"),
    ],
)
def test_a_cell_or_source_that_is_wrong_is_found(sources, cell, defined, problem):
    text = TABLE.format(cell=cell, defined=defined)
    found = [*sources.unsourced(text, PAGE.parent), *sources.undated(text)]
    assert any(problem in line for line in found), found


def test_a_good_table_passes(sources):
    text = TABLE.format(cell="[yes][a], [also](limits.md)", defined=GOOD)
    assert not [*sources.unsourced(text, PAGE.parent), *sources.undated(text)]


def test_it_says_where_others_are_better(sources):
    better = {row for row, cell in sources.cells(PAGE.read_text()) if "**" in cell}
    assert len(better) >= 3


def test_readme_says_the_same_of_the_same_libraries(sources):
    """README's short table has the columns of the page."""
    header = re.search(r"^\| \| qshard \|.*$", PAGE.read_text(), re.MULTILINE)[0]
    assert header in (CHECKOUT / "README.md").read_text()
