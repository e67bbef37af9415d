"""Records a run of the study: python bench/recipes_study/record_study.py RESULTS.json

Writes bench/results/DATE-recipes.md, and its table into bench/results/figures.json, from which
docs/performance_tables.py writes docs/recipes.md.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from study_tables import HEADS, cells, curve, seed_noise, steps_of_curve
from tabulate import tabulate

CHECKOUT = Path(__file__).resolve().parents[2]
FIGURES = CHECKOUT / "bench" / "results" / "figures.json"
TABLE, PAGE = "recipes", "docs/recipes.md"


def record(data: dict) -> str:
    """The page of a run."""
    where, sizes, runs = data["environment"], data["sizes"], data["runs"]
    heads = ["off bf16's, in %, after steps", *steps_of_curve(runs)]
    of_both = (cells(runs), HEADS), (curve(runs), heads)
    tables = [tabulate(rows, of, "github", disable_numparse=True) for rows, of in of_both]
    tables = [re.sub(r" +\|", " |", re.sub(r"-+\|", "---|", table)) for table in tables]
    failed = "".join(f"\n- {line}" for line in data["failed"])
    gpu = gpu_of(where)
    return f"""# {gpu[0].upper()}{gpu[1:]}: what the recipes do to a small Llama's loss, {where["date"]}

torch {where["torch"]}, `python bench/recipes_study`, {where["workers"]} processes side by side, {where["seconds"]} s.

{sizes["layers"]} blocks of {sizes["dim"]}, SwiGLU of {sizes["hidden"]}, {sizes["heads"]} heads. A step has
{sizes["batch"]} sequences of {sizes["length"]} bytes of Python's standard library.
{sizes["steps"]} steps of AdamW, fp32 masters, every recipe emulated. Losses are those of
{sizes["last_validation"]} held-out sequences after the last step, in nats a byte.
Differences are from bf16's of the same seeds: their means, and their range.

Range over the {len(runs["bf16"])} seeds of bf16: {seed_noise(runs):.2f} %.

{tables[0]}

{tables[1]}
{failed}"""


def gpu_of(where: dict) -> str:
    return "one " + where["device"].removeprefix("NVIDIA ").split()[0]


def figure(data: dict, source: str) -> str:
    """The table as figures.json has it."""
    where = data["environment"]
    rows = [
        {"gpus": gpu_of(where), "date": where["date"], "source": source, "cells": row, "lines": [f"| {row[0]} |"]}
        for row in cells(data["runs"])
    ]
    lines = ",\n".join(8 * " " + json.dumps(row, ensure_ascii=False) for row in rows)
    return (
        f'    "{TABLE}": {{\n      "page": "{PAGE}",\n      "command": "python bench/recipes_study",\n'
        f'      "heads": {json.dumps(HEADS)},\n      "rows": [\n{lines}\n      ]\n    }}'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what bench/recipes_study wrote")
    data = json.loads(parser.parse_args().results.read_text())
    source = f"bench/results/{data['environment']['date']}-recipes.md"
    (CHECKOUT / source).write_text(record(data))
    text = re.sub(rf',\n    "{TABLE}": {{\n.*?\n    }}', "", FIGURES.read_text(), flags=re.DOTALL)
    last = "\n    }\n  },\n"  # the end of "tables"
    FIGURES.write_text(text.replace(last, "\n    },\n" + figure(data, source) + "\n  },\n", 1))
    if f"<!-- table: {TABLE} -->" not in (CHECKOUT / PAGE).read_text():
        sys.exit(f"{PAGE} has no place for it: put <!-- table: {TABLE} --> and <!-- end --> there, then run "
                 "docs/performance_tables.py")


if __name__ == "__main__":
    main()
