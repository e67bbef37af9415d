"""Relative links and anchors of README and the pages lead to files and headings that are there."""

import re
import string
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
DOCS = CHECKOUT / "docs"
AT_THE_TOP = [CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*AT_THE_TOP, *sorted(DOCS.glob("*.md"))]
DEEPEST_ANCHOR = 3  # myst_heading_anchors of docs/conf.py


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page):
    """(target, anchor) of each link and image that has no scheme."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path if path else page), anchor


def slug(heading):
    """GitHub's anchor of a heading, which is MyST's, too."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    marks = set(string.punctuation) - set("-_")
    return "".join(letter for letter in words if letter not in marks).replace(" ", "-")


def anchors(page):
    headings = re.findall(rf"^#{{1,{DEEPEST_ANCHOR}}} +(.*)$", prose(page), re.MULTILINE)
    found, seen = set(), {}
    for name in map(slug, headings):
        seen[name] = seen.get(name, -1) + 1
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    dead = []
    for target, anchor in links(page):
        if not target.exists():
            dead.append(f"{target.name} does not exist")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            dead.append(f"{target.name} has no heading #{anchor}")
    assert not dead


def test_links_lead_to_files_that_git_has():
    targets = {target.resolve() for page in PAGES for target, _ in links(page) if target.exists()}
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, sorted(targets))], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert len(targets) > 20 and not ignored.stdout


def test_every_page_is_in_the_index_once():
    trees = re.findall(r"```\{toctree\}(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = [name for tree in trees for name in re.findall(r"^[\w-]+$", tree, re.MULTILINE)]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


@pytest.mark.parametrize("heading, expected", [
    ("Modules of qshard.nn", "modules-of-qshardnn"),
    ("`quantize_`, and back", "quantize_-and-back"),
    ("What weights=\"dynamic\" does", "what-weightsdynamic-does"),
    ("Reading `report()`", "reading-report"),
])
def test_anchors_are_those_of_github(heading, expected):
    assert slug(heading) == expected


def test_a_dead_anchor_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n\n## One\n\n[here](#one-1), [there](#two), [gone](gone.md), [out](https://pytorch.org#x)\n")
    assert anchors(page) == {"one", "one-1"}
    assert list(links(page)) == [(page, "one-1"), (page, "two"), (tmp_path / "gone.md", "")]
