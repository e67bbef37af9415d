"""Comments, docstrings, errors and pages name their actors, and their sentences begin with the subject."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = (
    "kernels", "dispatch", "ops", "fsdp", "loader", "qshard", "test", "bench", "examples", "docs", "cmake", ".ci",
)
KINDS = {".py", ".cpp", ".h", ".cu", ".cuh", ".md", ".cmake", ".txt", ".toml", ".sh"}
# Within identifiers, too.
WORDS = re.compile(r"(?<![a-z])(nobody|whoever|somebody|everybody|what becomes of)(?![a-z])", re.IGNORECASE)
# A comment, a docstring, one of its lines, a line or a cell of a page, or a later sentence.
OPENS = re.compile(r"""(^|//+[!<]?|/\*+|\#|"{3}|[.:;?!|(])\s*([*-]\s+)?(Of|Who)(\s|$)|[:;]\s+who\s""")


def lines():
    """Every line of the project's own text. Measurements in results/ are records, and stay as they were."""
    found = [file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file()]
    for file in [*ROOT.iterdir(), *found]:
        is_text = file.suffix in KINDS or file.name in ("Makefile", "run")
        if is_text and file.is_file() and file != Path(__file__) and "results" not in file.parts:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                yield f"{file.relative_to(ROOT)}:{number}: {line.strip()}", line


def is_vague(line):
    return bool(WORDS.search(line) or OPENS.search(line))


def test_sentences_name_their_actors():
    found = [at for at, line in lines() if is_vague(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "// Nobody waits for their amaxes.",
        "def test_nobody_hangs():",
        "/// What becomes of a tile of values in registers",
        "# Whoever writes it has seen the barrier.",
        "// Of overlaps torch has the word.",
        "///< Of the codes of inputs that wgrad reads",
        "/* Of a tile */",
        '    """Of the codes of inputs',
        "    Of the codes of inputs",
        "  scale_t scale;  // Of a block.",
        "the blocks are made. Of",
        "| Of a linear | codes |",
        "// Two in turn: who writes to one has seen all threads leave it.",
        "// Who holds a buffer reads its planes.",
    ],
)
def test_a_sentence_without_an_actor_is_found(line):
    assert is_vague(line)


@pytest.mark.parametrize("line", ["// The rank of a mesh", "Of::kPerVector", "ranks agree on who flushes", "Offset"])
def test_other_sentences_are_not(line):
    assert not is_vague(line)
