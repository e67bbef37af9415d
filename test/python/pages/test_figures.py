"""The figures of the pages: git has them as the script draws them, and each number is in the file that it names."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
FIGURES = CHECKOUT / "docs" / "figures"
RUNS = json.loads((CHECKOUT / "bench/results/figures.json").read_text())["step_time"]["runs"]


def tables(file):
    """The tables of a page, each as {row: {column: cell}}."""
    for block in re.findall(r"(?:^\|.*\|\n)+", file.read_text(), re.MULTILINE):
        header, _, *rows = [
            [cell.strip(" *`") for cell in line.strip("|\n").split("|")] for line in block.splitlines()
        ]
        yield {row[0]: dict(zip(header, row)) for row in rows}


def bars(run):
    return [bar[mode] for bar in run["bars"] for mode in ("eager", "compiled") if bar[mode] is not None]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["title"])
def test_a_panel_shows_one_table(run):
    """The first table that has all of its rows and columns; so no panel mixes runs."""
    wanted = bars(run)
    for table in tables(CHECKOUT / run["file"]):
        if all(bar["column"] in table.get(bar["row"], {}) for bar in wanted):
            assert [float(table[bar["row"]][bar["column"]]) for bar in wanted] == [bar["ms"] for bar in wanted]
            return
    pytest.fail(f"no table of {run['file']} has the rows of the panel")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["title"])
def test_a_panel_says_gpus_and_date(run):
    year, month, day = map(int, re.search(r"(\d+)-(\d+)-(\d+)", run["file"]).groups())
    assert month == 11 and f"{day} November {year}" in run["title"]
    gpu = re.search(r"h\d00", run["file"])[0].upper()
    assert re.search(rf"\b(One|Two|Four) {gpu}\b", run["title"])
    assert run["bars"][0]["label"] == "bf16"  # what the ratios are to


def texts(svg):
    """What a figure says."""
    return re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text(), re.DOTALL)


def test_tracked_figures_are_those_that_the_script_draws(tmp_path):
    subprocess.run([sys.executable, "docs/draw_figures.py", str(tmp_path)], cwd=CHECKOUT, check=True)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == sorted(file.name for file in FIGURES.glob("*.svg"))
    for name in drawn:
        assert texts(FIGURES / name) == texts(tmp_path / name), f"run docs/draw_figures.py: {name}"
        assert texts(FIGURES / name)


def test_git_tracks_the_figures():
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, FIGURES.iterdir())], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert not ignored.stdout
