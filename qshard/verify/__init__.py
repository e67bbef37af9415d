"""`python -m qshard verify`: whether the kernels and the GEMMs of this machine's GPU are right, and how fast."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

import qshard
from qshard._library import about_library
from qshard.verify import fused, gemms, kernels, plain
from qshard.verify.rows import Row, as_json, summary, table
from qshard.verify.timing import Clock

SCHEMA = 1  # of the JSON; a file of another is not read


def main(arguments: list[str]) -> int:
    """Prints a table, and writes what it found as JSON if asked to. 1 if anything is wrong, else 0."""
    parser = argparse.ArgumentParser("python -m qshard verify", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--json", type=Path, help="also write what was found here, to paste into an issue")
    args = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    missing = "There is no GPU" if device is None else ""
    if device is not None and not about_library(qshard.library_path())["cuda"]:
        device, missing = None, "The library was built without CUDA"
    if missing:
        print(f"{missing}: the CPU's operators and the emulated GEMMs are checked.\n")
    start = time.perf_counter()
    found = []
    for row in rows(device):
        found.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(found)} checks, {row.what:<40}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    about = facts(device)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    print(table(found))
    print(f"\n{summary(found)} in {time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(written(about, found))
    return int(any(row.is_wrong for row in found))


def rows(device: torch.device | None) -> Iterator[Row]:
    """The checks of the CPU, and of a CUDA device."""
    formats = torch.ops.qshard.formats()
    yield from plain.rows(formats)
    if device is None:
        return
    clock = Clock(device)
    with torch.cuda.device(device):
        yield from kernels.rows(kernels.cases(formats), device, clock)
        yield from fused.rows(device, clock)
        yield from gemms.rows(formats, device, clock)


def facts(device: torch.device | None) -> dict[str, str]:
    """What was checked, and with what."""
    about = {"device": "cpu", "capability": "", "qshard": qshard.__version__, "torch": torch.__version__}
    if device is not None:
        about["device"] = torch.cuda.get_device_name(device)
        about["capability"] = "%d.%d" % torch.cuda.get_device_capability(device)
    about["cuda"] = torch.version.cuda if device is not None else ""
    about["driver"] = _driver() if device is not None else ""
    return about | {"date": date.today().isoformat()}


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split()
    return found[0] if found else ""


def written(about: dict[str, str], found: list[Row]) -> str:
    """The JSON, a line for each row."""
    lines = ",\n  ".join(json.dumps(row) for row in as_json(found))
    head = json.dumps({"schema": SCHEMA, **about}, indent=1)[:-2]
    return f'{head},\n "rows": [\n  {lines}\n ]\n}}\n'
