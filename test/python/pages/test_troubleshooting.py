"""docs/troubleshooting.md quotes messages as the sources have them."""

import ast
import re
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).parents[3]
PAGE = CHECKOUT / "docs" / "troubleshooting.md"
# Text of a message between pieces of one template: a name, a shape, a path.
LONGEST_VALUE = 60
SHORTEST_TEMPLATE = 15
HOLE = "\0"


def messages():
    """What the page quotes, each on one line and without the exception's class."""
    quoted = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [" ".join(text.split()).split(": ", 1)[1] for text in quoted]


def python_templates(text):
    """Strings and f-strings of a file. HOLE stands for what is filled in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def cpp_templates(text):
    """Literals of a file. Neighbours are one, also with an argument, a macro or a sum between them."""
    text = text.replace('\\"', "\1")
    text = re.sub(r'"\s*\n\s*"', "", text)
    text = re.sub(r'"\s*(?:[,+]\s*[\w.():>,-]*(?:\s[\w.():>-]+)?\s*[,+]|[A-Z_]+)\s*"', HOLE, text)
    for literal in re.findall(r'"([^"\n]*)"', text):
        yield literal.replace("\1", '"').replace("{}", HOLE)


def templates():
    for file in (CHECKOUT / "qshard").rglob("*.py"):
        yield from python_templates(file.read_text())
    # Whose message names a function of ours.
    yield from python_templates(Path(torch.__file__).with_name("_weights_only_unpickler.py").read_text())
    for folder in ("dispatch", "ops", "fsdp", "loader", "kernels"):
        for suffix in ("*.cpp", "*.h"):
            for file in (CHECKOUT / folder).rglob(suffix):
                yield from cpp_templates(file.read_text())


def fixed_parts(template):
    return [part for part in template.split(HOLE) if part.strip()]


def left_of(message, parts_of_templates):
    """The runs of a message that no template has."""
    covered = [False] * len(message)
    for parts in parts_of_templates:
        if not all(part in message for part in parts):
            continue
        pattern = "(.*?)".join(f"(?P<p{i}>{re.escape(part)})" for i, part in enumerate(parts))
        found = re.search(pattern, message)
        if found is None:
            continue
        for i in range(len(parts)):
            begin, end = found.span(f"p{i}")
            covered[begin:end] = [True] * (end - begin)
    marked = "".join(letter if not is_in else HOLE for letter, is_in in zip(message, covered))
    return [run for run in marked.split(HOLE) if run]


@pytest.fixture(scope="module")
def all_parts():
    parts = {tuple(fixed_parts(template)) for template in templates()}
    return [found for found in parts if sum(map(len, found)) >= SHORTEST_TEMPLATE]


@pytest.mark.parametrize("message", messages(), ids=lambda message: message[:40])
def test_a_message_is_in_the_sources(message, all_parts):
    left = left_of(message, all_parts)
    stale = [run for run in left if len(run) > LONGEST_VALUE]
    assert not stale, stale
    assert sum(map(len, left)) < len(message) / 2, left


def test_a_stale_message_is_found(all_parts):
    message = next(text for text in messages() if "DistributedDataParallel collects" in text)
    assert any(len(run) > LONGEST_VALUE for run in left_of(message.replace("of the tensors", "of tensors"), all_parts))


def test_each_message_has_a_reason_and_a_way_out():
    page = PAGE.read_text()
    number = len(messages())
    assert number >= 20
    assert page.count("**Why:**") == page.count("**Do:**") == number
    mistakes = page.split("## The ten first mistakes")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d+\. \*\*", mistakes, re.MULTILINE)) == 10
