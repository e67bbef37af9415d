"""The classes of C++ headers and their public member functions, read without a compiler.

It knows what our headers use: nested classes, templates, bodies and initializer lists. Overloads
count one by one; what is `= default` or `= delete`, and friends, do not count."""

import re

NO_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^\s*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
CLASS = re.compile(
    r"(?:template <.*> )?\b(class|struct) ((?:\w+::)*\w+) ?(?:final ?)?(?:: ?[^:].*)?$"
)
ACCESS = re.compile(r"\b(public|private|protected)\s*$")


def public_functions(source):
    """{class: [declaration of a public member function, ...]}"""
    classes = {}
    _read_scope(NO_CODE.sub(" ", source), 0, "", None, classes)
    return classes


def _read_scope(text, at, name, public, classes):
    """Reads declarations up to the end of the scope of class `name`, which is public from here on,
    private, or (None) no class; the position of its brace."""
    start = at
    while at < len(text) and text[at] != "}":
        declaration = " ".join(text[start:at].split())
        if text[at] == "(":
            at = _end_of(text, at)
        elif text[at] == ";":
            _note(declaration, public, classes.get(name))
            start = at = at + 1
        elif text[at] == ":" and public is not None and ACCESS.search(declaration):
            public = declaration.split()[-1] == "public"
            start = at = at + 1
        elif text[at] != "{":
            at += 1
        elif re.match(r"(inline )?namespace\b|extern\b", declaration):
            start = at = _read_scope(text, at + 1, name, None, classes) + 1
        elif found := CLASS.match(declaration):
            inner = f"{name}::{found[2]}" if name else found[2]
            classes.setdefault(inner, [])
            start = at = _read_scope(text, at + 1, inner, found[1] == "struct", classes) + 1
        else:
            at = _end_of(text, at)
            initializes = re.search(r"\) ?: ", declaration) and text[at:].lstrip()[:1] in ("{", ",")
            if "(" in declaration and not initializes and not declaration.endswith("="):
                _note(declaration, public, classes.get(name))
                start = at
    return at


def _end_of(text, at):
    """The position behind the brackets that begin at this one."""
    depth = 0
    while True:
        depth += (text[at] in "({") - (text[at] in ")}")
        at += 1
        if depth == 0:
            return at


def _note(declaration, public, functions):
    before = declaration.partition("(")[0]
    is_function = (
        "(" in declaration
        and not re.match(r"(friend|using|typedef|static_assert|enum)\b", declaration)
        and not re.search(r"= (default|delete)$", declaration)
        and ("=" not in before or "operator" in before)  # else a member and its value
        and "std::function<" not in before
    )
    if public and is_function:
        functions.append(declaration)
