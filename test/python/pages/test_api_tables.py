"""The tables of docs/api.md say what the library says of formats, and what a report's rows have."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import qshard
from qshard.formats import info_of
from qshard.report import ParameterReport

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
DTYPES = {
    torch.float8_e4m3fn: "E4M3",
    torch.float4_e2m1fn_x2: "E2M1",
    torch.float8_e8m0fnu: "E8M0",
    torch.float32: "fp32",
}


def rows(first_column):
    """The cells of the table whose first column has this title, without the marks of code."""
    table = PAGE.split(f"| {first_column} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


RECIPES = rows("recipe")


def block_of(level):
    if level.spans_matrix:
        return "the tensor"
    return "a row" if level.block_cols is None else f"{level.block_rows}x{level.block_cols}"


def facts_of(format):
    """Columns of the table, from the description of a format."""
    info = info_of(format)
    block, scales = block_of(info.scale), DTYPES[info.scale.dtype]
    if info.columnwise is not None:
        block += f", and {block_of(info.columnwise)} for dgrad"
    if info.scale.power_of_two and scales == "fp32":
        scales += ", powers of two"
    if info.amax_history is not None:
        scales += ", of earlier amaxes"
    if info.outer_scale is not None:
        scales += f", and {DTYPES[info.outer_scale.dtype]} for {block_of(info.outer_scale)}"
    return [DTYPES[info.code_dtype], block, scales]


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: row[1])
def test_a_recipe_makes_this_format(row):
    call, name = row[0].strip("`"), row[1].strip("`")
    recipe = eval(f"qshard.{call}", {"qshard": qshard})
    assert recipe.format == name
    assert facts_of(name) == row[2:]


def test_every_format_has_a_recipe_in_the_table():
    assert sorted(row[1].strip("`") for row in RECIPES) == sorted(qshard.ops.formats())


def test_options_stand_in_brackets():
    for recipe in (
        qshard.DelayedScaling(margin=1, amax_history_len=16, fp8_format="E4M3"),
        qshard.MXFP8BlockScaling(weight_block=(1, 32), gather="phase"),
        qshard.NVFP4BlockScaling(emulate=True),
    ):
        assert f"`{recipe.format}`" in PAGE


def test_rows_of_a_report_have_these_attributes():
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows("attribute")))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(ParameterReport))
