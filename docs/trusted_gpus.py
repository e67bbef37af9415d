"""Writes what runs of `python -m qshard verify` say of GPUs: python docs/trusted_gpus.py

It reads the files bench/results/verify-*.json. It writes kernels/gemm/trusted_gemms.inc, whose GEMMs are not checked
at their first use, and the tables of docs/install.md between `<!-- table: NAME -->` and `<!-- end -->`.
test_verify_files.py fails where either differs from the files.
"""

import json
from pathlib import Path

from performance_tables import CHECKOUT, markdown, written

RESULTS = CHECKOUT / "bench" / "results"
CONSTANT = CHECKOUT / "kernels" / "gemm" / "trusted_gemms.inc"
PAGE = CHECKOUT / "docs" / "install.md"
SCHEMA = 1
ARCHITECTURES = {
    "Ampere (8.0, 8.6)": ("8.0", "8.6"),
    "Ada (8.9)": ("8.9",),
    "Hopper (9.0)": ("9.0",),
    "Blackwell (10.0, 10.3, 12.0)": ("10.0", "10.3", "12.0"),
}
# Formats whose linears have the same GEMMs, what those are, and the first and last capability that has them.
GEMMS = (
    (("float8_tensorwise", "float8_delayed"), "FP8", "8.9", None),
    (("float8_rowwise",), "FP8", "9.0", "9.0"),
    (("float8_blockwise",), "FP8", "9.0", "9.0"),
    (("mxfp8", "nvfp4"), "block-scaled", "10.0", None),
)


def number(capability: str) -> int:
    """90 of 9.0."""
    major, minor = capability.split(".")
    return 10 * int(major) + int(minor)


def runs(folder: Path = RESULTS) -> list[dict]:
    """The runs on GPUs, by name of the file."""
    found = []
    for file in sorted(folder.glob("verify-*.json")):
        run = json.loads(file.read_text())
        if run["schema"] != SCHEMA or not run["capability"]:
            raise ValueError(f"{file}: schema {run['schema']} of {run['device']}; this reads schema {SCHEMA} of GPUs")
        found.append(run | {"file": file.name})
    return found


def is_right(run: dict, format: str) -> bool:
    """Whether the format's GEMMs ran and were within their bounds, and nothing else of the format was wrong."""
    base = format.partition("[")[0]
    of_format = [row for row in run["rows"] if row["format"].partition("[")[0] == base]
    gemms = [row for row in of_format if row["kind"] == "gemm" and row["format"] == format]
    return any(row["result"] == "within bound" for row in gemms) and all(row["result"] != "wrong" for row in of_format)


def is_wrong(run: dict, format: str) -> bool:
    rows = [row for row in run["rows"] if row["format"] == format]
    return not is_right(run, format) and any(row["result"] == "wrong" for row in rows)


def trusted(found: list[dict]) -> list[tuple[int, str]]:
    """(capability, format) of GEMMs that a run saw right, and none wrong."""
    pairs = {
        (number(run["capability"]), row["format"])
        for run in found
        for row in run["rows"]
        if row["kind"] == "gemm" and is_right(run, row["format"])
    }
    wrong = {
        (number(run["capability"]), row["format"])
        for run in found
        for row in run["rows"]
        if row["kind"] == "gemm" and is_wrong(run, row["format"])
    }
    return sorted(pairs - wrong)


def constant(found: list[dict]) -> str:
    lines = [f'{{{capability}, "{format}"}},\n' for capability, format in trusted(found)]
    return "// Written by docs/trusted_gpus.py of the files bench/results/verify-*.json.\n" + "".join(lines)


def names(found: list[dict]) -> str:
    return ", ".join(dict.fromkeys(run["device"].removeprefix("NVIDIA ") for run in found))


def gemm_table(found: list[dict]) -> str:
    rows = [["kernels: quantize, updates, messages, every format"]]
    for capabilities in ARCHITECTURES.values():
        of_architecture = [run for run in found if run["capability"] in capabilities]
        kernels = [run for run in of_architecture
                   if all(row["result"] != "wrong" for row in run["rows"] if row["kind"] == "kernel")]
        rows[0].append(f"right on {names(kernels)}" if kernels else "no run")
    known = set(trusted(found))
    for formats, kind, first, last in GEMMS:
        cells = [", ".join(f"`{format}`" for format in formats) + " linear"]
        for capabilities in ARCHITECTURES.values():
            has = [c for c in capabilities if number(first) <= number(c) <= number(last or "99.0")]
            right = [run for run in found if run["capability"] in has
                     and all((number(run["capability"]), format) in known for format in formats)]
            seen = f"right on {names(right)}" if right else "checked at first use"
            cells.append(f"{kind}, {seen}" if has else "dequantized")
        rows.append(cells)
    return markdown(["", *ARCHITECTURES], rows)


def run_table(found: list[dict]) -> str:
    def counted(run):
        results = [row["result"] for row in run["rows"]]
        return ", ".join(f"{results.count(r)} {r}" for r in ("equal", "within bound", "skipped", "wrong"))

    rows = [
        [f"`{run['file']}`", run["device"], run["capability"], run["torch"], run["cuda"], run["driver"], counted(run)]
        for run in found
    ]
    heads = ["file of bench/results", "GPU", "compute capability", "torch", "CUDA", "driver", "checks"]
    return markdown(heads, rows or [["none yet"] + ["-"] * (len(heads) - 1)])


def files(folder: Path = RESULTS) -> dict[Path, str]:
    """Each file as it should be."""
    found = runs(folder)
    tables = {"gpus": gemm_table(found), "verify-runs": run_table(found)}
    return {CONSTANT: constant(found), PAGE: written(PAGE.read_text(), tables)}


if __name__ == "__main__":
    for file, text in files().items():
        file.write_text(text)
