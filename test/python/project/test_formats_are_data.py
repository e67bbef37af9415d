"""Code asks a format's description for what it wants to know (kernels/format/formats.h)."""

import re
from pathlib import Path

from reference import formats as reference

CHECKOUT = Path(__file__).parents[3]


def sources(folders, suffixes):
    for folder in folders:
        for file in sorted((CHECKOUT / folder).rglob("*")):
            if file.suffix in suffixes:
                yield file


def test_no_code_goes_by_the_name_of_a_format():
    """A name that is compared with stands for a property, which the format's description has."""
    known = "|".join(sorted(reference.FORMATS, key=len, reverse=True))
    compared = re.compile(
        rf"""(?:[=!]= ?|startswith\(\(?|\bin \()["'](?:{known})|["'](?:{known})[\w\[]*["'] ?[=!]="""
    )
    found = [
        f"{file.relative_to(CHECKOUT)}: {match.group(0)}"
        for file in sources(
            ("kernels", "dispatch", "ops", "fsdp", "qshard"), (".h", ".cpp", ".cu", ".cuh", ".py")
        )
        if file.parent != CHECKOUT / "kernels/format"
        for match in compared.finditer(file.read_text())
    ]
    assert not found, found


def test_no_code_infers_one_property_of_a_format_from_another():
    """A block of 0 rows spans the matrix: ScaleLevel says so."""
    inferred = re.compile(
        r"(?:format|layout|scale)[\w.()>-]*block_(?:rows|cols) *[!=]= *0\b|scales_in_grid\(|row_scale *[!=]="
    )
    found = [
        f"{file.relative_to(CHECKOUT)}: {match.group(0)}"
        for file in sources(("kernels", "dispatch", "ops", "fsdp"), (".h", ".cpp", ".cu", ".cuh"))
        if file.parent != CHECKOUT / "kernels/format"
        for match in inferred.finditer(file.read_text())
    ]
    assert not found, found
