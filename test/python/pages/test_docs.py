"""The documentation: its snippets run, and every public name is in the reference."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import docs_snippets
import pytest
import torch

import qshard

BUDGET_S = 80  # its compiled snippet takes 30 s, the pages 15
CHECKOUT = Path(__file__).parents[3]
DOCS = CHECKOUT / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if any(docs_snippets.blocks(page))]  # README: test_readme.py


def run_python(*arguments):
    """What it prints; on the CPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "QSHARD_LIBRARY": qshard.library_path()}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=600, env=environment, cwd=CHECKOUT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def snippet_results():
    """One process for all pages, on the CPU: their meshes are."""
    printed = run_python(docs_snippets.__file__, *map(str, PAGES))
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, snippet_results):
    assert not snippet_results[str(page)], snippet_results[str(page)]


def test_the_pages_build_without_warnings(tmp_path):
    """As `make docs` builds them."""
    pytest.importorskip("sphinx", reason="needs sphinx, myst-parser and furo (make docs installs them)")
    run_python("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path))


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"auto(?:function|class|module):: (?:qshard\.)?(\w+)", page))
    for name in qshard.__all__:
        assert name in shown or f"`qshard.{name}`" in page, f"docs/api.md lacks {name}"
        thing = getattr(qshard, name)
        assert inspect.getdoc(thing), f"qshard.{name} has no docstring"


def test_every_operator_is_in_the_reference():
    """docs/operators.md shows all of qshard.ops."""
    assert "automodule:: qshard.ops\n   :members:" in (DOCS / "operators.md").read_text()
    schemas = {
        schema.name.removeprefix("qshard::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("qshard::") and not schema.name.startswith("qshard::_")
    }
    assert sorted(schemas) == sorted(qshard.ops.__all__)
    for name, schema in schemas.items():
        function = getattr(qshard.ops, name)
        parameters = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in parameters] == [
            (argument.name, argument.kwarg_only) for argument in schema.arguments
        ], name
        for parameter, argument in zip(parameters, schema.arguments):
            has_default = parameter.default is not parameter.empty
            assert has_default == argument.has_default_value(), (name, parameter.name)
            if has_default:
                default = argument.default_value
                if isinstance(parameter.default, torch.dtype):  # schemas have c10::ScalarType's number
                    default = {6: torch.float32}[default]
                assert parameter.default == default, (name, parameter.name)
        assert inspect.getdoc(function), f"qshard.ops.{name} has no docstring"
        assert getattr(torch.ops.qshard, name).__doc__ == inspect.getdoc(function)
