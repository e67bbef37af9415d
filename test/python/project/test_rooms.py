"""The table of rooms in CONTRIBUTING.md: which folder may include or import from which, and how full they are."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CPP, CPP_ROOTS = (".h", ".cpp", ".cu", ".cuh"), ("kernels", "dispatch", "ops", "fsdp", "loader")
MOST_FILES, MOST_LINES = 17, 500
# Other readers than the package's: one folder holds a result each, the others what tests compare with.
NO_ROOMS = ("bench/results", "test/golden/files", "test/python/files", "test/python/programs/saved")


def rows():
    """{room: number of its row in the table}"""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text()
    table = text.split("| rooms | what they hold |")[1].split("\n\n")[0]
    found = {}
    for number, row in enumerate(table.strip().splitlines()[1:]):
        for room in re.findall(r"`([^`]+)`", row.split("|")[1]):
            assert room not in found, f"{room} stands twice"
            found[room] = number
    return found


def room_of(file, found):
    """A file that has a row of its own is a room."""
    name = str(file.relative_to(CHECKOUT))
    return name if name in found else str(file.parent.relative_to(CHECKOUT))


def cpp_files():
    for root in CPP_ROOTS:
        yield from (file for file in sorted((CHECKOUT / root).rglob("*")) if file.suffix in CPP)


def cpp_uses():
    for file in cpp_files():
        for name in INCLUDE.findall(file.read_text()):
            yield file, CHECKOUT / name


def modules():
    """{name of a module: its file}"""
    named = {}
    for file in (CHECKOUT / "qshard").rglob("*.py"):
        parts = file.relative_to(CHECKOUT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def python_uses():
    named = modules()
    for file in named.values():
        names = set(imported(ast.parse(file.read_text())))
        # `from package import module` uses the module, not what the package's __init__ holds.
        packages = {name.rpartition(".")[0] for name in names if name in named}
        for name in names - packages:
            if name in named:
                yield file, named[name]


@pytest.mark.parametrize("uses", [cpp_uses, python_uses])
def test_rooms_use_only_those_above_them_in_the_table(uses):
    found, wrong, seen = rows(), defaultdict(set), 0
    for file, used in uses():
        assert used.exists(), f"{file} uses {used}, which is not there"
        here, there = room_of(file, found), room_of(used, found)
        assert here in found, f"{here} is not in the table of rooms of CONTRIBUTING.md"
        seen += 1
        if here != there and found[there] >= found[here]:
            wrong[f"{here} -> {there}"].add(f"{file.name} uses {used.name}")
    assert seen > 100 and not wrong


def test_every_room_of_the_table_is_there():
    gone = [room for room in rows() if not (CHECKOUT / room).exists()]
    assert not gone


def folders():
    for root in (*CPP_ROOTS, "qshard", "test", "bench", "examples", "cmake", "docs"):
        for folder in [CHECKOUT / root, *(CHECKOUT / root).rglob("*/")]:
            name = str(folder.relative_to(CHECKOUT))
            if folder.is_dir() and "__pycache__" not in name and not name.startswith(NO_ROOMS):
                yield name, [file for file in folder.iterdir() if file.is_file()]


def test_no_room_is_overfull():
    """A header and its source are one file."""
    full = {}
    for name, files in folders():
        stems = {file.stem for file in files if file.suffix in (*CPP, ".py")}
        if len(stems) > MOST_FILES:
            full[name] = len(stems)
    assert not full


def test_no_file_is_too_long():
    long = {}
    for name, files in folders():
        for file in files:
            if file.suffix in (*CPP, ".py") and (lines := len(file.read_text().splitlines())) > MOST_LINES:
                long[f"{name}/{file.name}"] = lines
    assert not long


def test_cpp_names_no_recipe_of_the_package_and_no_autograd_node():
    """Formats have names below the package; recipes are its own. Nodes are found by their type."""
    recipes = re.findall(r"^class (\w+)", (CHECKOUT / "qshard" / "recipes.py").read_text(), re.MULTILINE)
    spelled = [rf"\b{name}\(" for name in recipes] + [r"name\(\) == \"\w+Backward"]
    wrong = []
    for file in cpp_files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if any(re.search(pattern, line) for pattern in spelled):
                wrong.append(f"{file.relative_to(CHECKOUT)}:{number}: {line.strip()}")
    assert len(recipes) > 4 and not wrong


def test_operators_of_the_library_are_defined_in_cpp():
    """No Python adds schemas that C++ would have to look up by name."""
    for file in modules().values():
        assert not re.search(r"Library\(\"qshard\"|\.define\(", file.read_text()), file


def test_the_state_of_autograd_functions_has_one_owner():
    """Elsewhere it would be strings that a forward and its backward have to spell alike."""
    owner = CHECKOUT / "ops/calls/saved_state.h"
    users = [
        file
        for root in CPP_ROOTS
        for file in (CHECKOUT / root).rglob("*")
        if file.suffix in CPP and "saved_data" in file.read_text()
    ]
    assert users == [owner]
