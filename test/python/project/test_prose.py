"""Comments, docstrings, errors and pages name their actors, and their sentences begin with the subject."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("kernels", "dispatch", "ops", "fsdp", "loader", "qshard", "test", "bench", "examples", "docs")
KINDS = {".py", ".cpp", ".h", ".cu", ".cuh", ".md"}
WORDS = re.compile(r"\b(nobody|whoever|somebody|everybody|what becomes of)\b", re.IGNORECASE)
# A comment, a docstring, one of its lines or a line of a page, or a later sentence.
OPENS_WITH_OF = re.compile(r"""(^|//+!?|\#|\"{3}|[.:?])\s*Of\s""")


def lines():
    files = [*ROOT.glob("*.md"), *(file for room in ROOMS for file in (ROOT / room).rglob("*"))]
    for file in files:
        is_ours = file.suffix in KINDS and file != Path(__file__) and "results" not in file.parts
        for number, line in enumerate(file.read_text().splitlines() if is_ours else (), 1):
            yield f"{file.relative_to(ROOT)}:{number}: {line.strip()}", line


def test_sentences_name_their_actors():
    found = [at for at, line in lines() if WORDS.search(line) or OPENS_WITH_OF.search(line)]
    assert not found, "\n".join(found)
