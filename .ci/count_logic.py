"""Counts lines of Python logic in qshard/ and fsdp/, and prints both and the sum.

    python .ci/count_logic.py [FOLDER of a checkout]

A line of logic is a line of a .py file that holds some code: a token other than a comment, a docstring
or white space. A docstring is the first statement of a module, class or function if it is a string
alone. A statement over several lines counts as many; so do strings over several lines that are no
docstrings.
"""

import ast
import sys
import tokenize
from pathlib import Path

FOLDERS = ("qshard", "fsdp")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_docstrings(tree: ast.AST) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if not isinstance(node, _WITH_DOCSTRINGS) or ast.get_docstring(node, clean=False) is None:
            continue
        docstring = node.body[0]
        lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def count_file(path: Path) -> int:
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in _NO_CODE]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    return len(lines - lines_of_docstrings(ast.parse(path.read_bytes())))


def main(root: Path) -> None:
    total = 0
    for folder in FOLDERS:
        count = sum(map(count_file, sorted((root / folder).rglob("*.py"))))
        print(f"{count:6,} {folder}/")
        total += count
    print(f"{total:6,} lines of logic")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent))
