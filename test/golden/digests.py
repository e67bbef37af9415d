"""Golden digests: whether a bit of what qshard stores, sends or computes has moved.

    python test/golden/digests.py compare                         # QSHARD_LIBRARY, or the package
    python test/golden/digests.py compare --device cuda
    python test/golden/digests.py write                           # into digests.json
    python test/golden/digests.py write --device cuda --out FILE  # what differs from the CPU's

digests.json holds the digests of the CPU and, under "cuda", what differs there. A section of bytes
that PyTorch decides has one set for each version of PyTorch that it was written with.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch

if path := os.environ.get("QSHARD_LIBRARY"):
    torch.ops.load_library(path)

import fixtures
import measure

STORED = Path(__file__).with_name("digests.json")
SECTIONS = (*measure.SECTIONS, *fixtures.SECTIONS)


def key_of(section):
    """The section's name in the file."""
    version = ".".join(torch.__version__.split(".")[:2])
    return f"{section} (torch {version})" if section in measure.OF_TORCH else section


def measured(section, device):
    """{case: "part digest, part digest"}, one line each in the file."""
    cases = (measure.SECTIONS | fixtures.SECTIONS)[section](device)
    return {case: ", ".join(map(" ".join, parts.items())) for case, parts in cases}


def expected(stored, section, device):
    """What the file has for a section; None if nothing, as for a version of torch that is new."""
    known = stored.get(key_of(section))
    own = stored.get("cuda", {}).get(key_of(section)) if device == "cuda" else None
    return known if own is None else (known or {}) | own


def parts_of(line):
    return dict(part.rsplit(" ", 1) for part in line.split(", "))


def differences(known, found):
    """A line for each entry of `found` that is not as known, and for each that is gone."""
    lines = []
    for case in {**known, **found}:
        if case not in found or case not in known:
            lines.append(f"{case}: {'is gone' if case not in found else 'is new'}")
            continue
        old, new = parts_of(known[case]), parts_of(found[case])
        lines += [
            f"{case}: {name} {old.get(name, 'was not there')}, now {new.get(name, 'gone')}"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]
    return lines


def compare(stored, sections, device):
    """Prints what moved. Returns whether nothing did."""
    same = True
    for section in sections:
        known, found = expected(stored, section, device), measured(section, device)
        if not found:  # another device's
            continue
        if known is None:
            print(f"{key_of(section)}: not in {STORED.name}; digests.py write adds it")
            continue
        for line in differences(known, found):
            same = False
            print(f"{section}: {line}")
    return same


def write(stored, sections, device, out):
    if device == "cuda":
        new = {}
        for section in sections:
            known, found = stored.get(key_of(section), {}), measured(section, device)
            different = {case: line for case, line in found.items() if known.get(case) != line}
            if different:
                new[key_of(section)] = different
        stored["cuda"] = {**stored.get("cuda", {}), **new}
        # Sections that no longer differ.
        for section in {key_of(section) for section in sections} - new.keys():
            stored["cuda"].pop(section, None)
        result = stored["cuda"] if out else stored
    else:
        for section in sections:
            if found := measured(section, device):
                stored[key_of(section)] = found
        result = stored
    (out or STORED).write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out or STORED}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("write", "compare"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument(
        "--out", type=Path, help=f"default: {STORED.name}; with cuda: its entries alone"
    )
    arguments = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    sections = arguments.section or SECTIONS
    if arguments.mode == "write":
        return write(stored, sections, arguments.device, arguments.out)
    if not compare(stored, sections, arguments.device):
        sys.exit("bits moved; CONTRIBUTING.md says when digests may be written anew")
    print("no bit moved")


if __name__ == "__main__":
    main()
