"""A model of step time on many GPUs: python bench/scale [--write]

Prints the tables of docs/scale.md. --write: writes them into docs/figures/scale.json, from which
docs/performance_tables.py writes the page and docs/draw_figures.py its plot. step_model.py says what the model is,
recorded_steps.py compares it with recorded steps, fake_ranks.py runs one rank of 1,024 and 8,192.
"""

import argparse
import json
from pathlib import Path

import recorded_steps
from scale_tables import output
from tabulate import tabulate

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "scale.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"also write {FIGURE.name}")
    args = parser.parse_args()
    data = output()
    for name, table in data["tables"].items():
        print(f"\n{name}\n\n{tabulate(table['rows'], table['heads'], 'pipe', disable_numparse=True)}")
    found = recorded_steps.rows()
    print(f"\n{sum(run['meets'] for run in found)} of {len(found)} recorded steps within {recorded_steps.MOST:.0%}")
    if args.write:
        lines = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(data['plot'][key], ensure_ascii=False)}" for key in data["plot"]
        )
        tables = ",\n".join(
            f'  {json.dumps(name)}: {{"heads": {json.dumps(table["heads"], ensure_ascii=False)}, "rows": [\n'
            + ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in table["rows"])
            + "\n  ]}"
            for name, table in data["tables"].items()
        )
        FIGURE.write_text(f'{{"plot": {{\n{lines}\n}},\n"tables": {{\n{tables}\n}}}}\n')


if __name__ == "__main__":
    main()
