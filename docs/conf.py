"""Sphinx's configuration; `make docs` builds build/docs/index.html."""

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qshard  # noqa: E402

project = "qshard"
copyright = "2026, the qshard authors"
version = release = qshard.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "qshard"
html_static_path = html_css_files = ["pages.css"]
html_show_sourcelink = False
nitpicky = False
smartquotes_action = "De"  # dashes and ellipses; quotes stand in code, too
default_role = "literal"  # `x` in docstrings, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def arguments_as_fields(app, what, name, obj, options, lines):
    """Our docstrings explain arguments as `name: text` or `a, b: text`; Sphinx has fields for them."""
    try:
        parameters = set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        parameters = set()
    if inspect.isclass(obj):
        parameters |= set(dir(obj))
    fields: list[str] = []
    in_field = False
    for line in lines:
        match = re.match(r"(\w+(?:, \w+)*)(\([\w, ]*\))?: (.*)", line)
        names = match.group(1).split(", ") if match else []
        is_field = bool(match) and set(names) <= parameters
        if is_field != in_field and not (in_field and line.startswith(" ")) and fields and fields[-1]:
            fields.append("")
        in_field = is_field or (in_field and (line.startswith(" ") or not line))
        if is_field:  # without a space, at which Sphinx would split a type off
            line = f":param {','.join(names)}: {match.group(3)}"
        fields.append(line)
    lines[:] = fields


def names_as_names(app, what, name, obj, options, lines):
    """To reStructuredText a bare `quantize_` is a link that reads "quantize"."""
    spans = "\n".join(lines).split("`")
    spans[::2] = (re.sub(r"(?<![\w.:])([a-z]\w*_)(?![\w*(])", r"``\1``", span) for span in spans[::2])
    lines[:] = "`".join(spans).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", arguments_as_fields)
    app.connect("autodoc-process-docstring", names_as_names)
