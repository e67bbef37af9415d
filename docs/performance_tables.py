"""Writes tables of data files into the pages that show them: python docs/performance_tables.py

bench/results/figures.json has what was measured, docs/figures/scale.json what the model of bench/scale says. A table
stands between `<!-- table: NAME -->` and `<!-- end -->`. test_performance.py fails where a page has another table than the
data, and where the data has a number that the named lines of bench/results do not have; test_scale.py looks at the model.
"""

import json
import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
DATA = CHECKOUT / "bench" / "results" / "figures.json"
MODEL, MODEL_PAGE = CHECKOUT / "docs" / "figures" / "scale.json", CHECKOUT / "docs" / "scale.md"
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines).replace("|  ", "| ")


def run_of(row: dict) -> str:
    return f"{row['gpus']}, `{Path(row['source']).name}`"


def table_of(table: dict) -> str:
    ends = [[run_of(row)] if table.get("shows_run") else [] for row in table["rows"]]
    return markdown(table["heads"], [row["cells"] + end for row, end in zip(table["rows"], ends)])


def written(text: str, tables: dict[str, str]) -> str:
    """The page with the current tables; a KeyError names a table that the data lacks."""
    return PLACE.sub(lambda match: match[1] + tables[match[2]] + match[3], text)


def pages() -> dict[Path, str]:
    """The pages of both files, each as it should be."""
    data = json.loads(DATA.read_text())["tables"]
    model = json.loads(MODEL.read_text())["tables"]
    tables = {name: table_of(table) for name, table in data.items()}
    tables |= {f"scale-{name}": markdown(table["heads"], table["rows"]) for name, table in model.items()}
    files = sorted({MODEL_PAGE, *(CHECKOUT / table["page"] for table in data.values())})
    return {file: written(file.read_text(), tables) for file in files}


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
