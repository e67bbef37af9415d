#!/usr/bin/env python3
"""check_sources.py [page.md]: the sources of docs/comparison.md's tables. --offline: form and dates alone.

A cell is "not known", or it has a link. A link is to a page of the docs, or by a name that is defined below the tables:
`[name]: https://… "2026-08-22"`, the date of what was read. Files on GitHub are those of a commit, so that the page
stays as it was read. Where there is a network each address is asked for, and one that is gone is an error.
"""

import argparse
import re
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "comparison.md"
DEFINED = re.compile(r'^\[([\w-]+)\]: +(\S+)(?: +"(.*)")?$', re.MULTILINE)
BY_NAME = re.compile(r"\[[^\]]+\]\[([\w-]+)\]")
TO_PAGE = re.compile(r"\[[^\]]+\]\(([^)]+)\)")
OF_A_COMMIT = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/")
GONE = {404, 410}


def cells(text: str):
    """(row's name, cell) of the tables' bodies, but for the names of rows."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            name, *row = [cell.strip() for cell in line.strip("|").split("|")]
            for cell in row:
                yield name, cell


def unsourced(text: str, folder: Path):
    """What is wrong with the tables: cells without a source, links that lead nowhere."""
    defined = {name for name, _, _ in DEFINED.findall(text)}
    found = list(cells(text))
    if not found:
        yield "no tables"
    for row, cell in found:
        names, pages = BY_NAME.findall(cell), TO_PAGE.findall(cell)
        if not names and not pages and cell != "not known":
            yield f"{row}: no source for {cell!r}"
        for name in names:
            if name not in defined:
                yield f"{row}: {name} is not defined"
        for page in pages:
            if not page.startswith("https://") and not (folder / page.split("#")[0]).exists():
                yield f"{row}: no page {page}"
    used = set(BY_NAME.findall(text))
    for name in sorted(defined - used):
        yield f"{name} is not used"


def undated(text: str):
    """Sources without a date, or of a branch that goes on."""
    for name, address, day in DEFINED.findall(text):
        try:
            if date.fromisoformat(day) > date.today():
                yield f"{name}: {day} is yet to come"
        except ValueError:
            yield f"{name}: no date"
        if not address.startswith("https://"):
            yield f"{name}: no https address"
        if "//github.com/" in address and "/blob/" in address and not OF_A_COMMIT.match(address):
            yield f"{name}: a file on GitHub, and no commit"


def problem_of(address: str) -> str:
    """What an address answers if it is gone, else nothing: servers that are busy say nothing about it."""
    request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "qshard-check-sources"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        return f"{address}: {error.code}" if error.code in GONE else ""
    except OSError as error:
        return f"{address}: {error}"
    return ""


def has_network() -> bool:
    try:
        urllib.request.urlopen("https://github.com", timeout=10).close()
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--offline", action="store_true", help="ask no server")
    args = parser.parse_args()
    text = args.page.read_text()
    problems = [*unsourced(text, args.page.parent), *undated(text)]
    addresses = sorted({address.split("#")[0] for _, address, _ in DEFINED.findall(text)})
    if args.offline or not has_network():
        print("no network: links were not tried")
    else:
        with ThreadPoolExecutor(8) as pool:
            problems += filter(None, pool.map(problem_of, addresses))
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{len(list(cells(text)))} cells, {len(addresses)} sources, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
