"""Calls every operator of qshard with arguments that a stranger might give.

    python test/python/fuzz/fuzz_operators.py --calls 100000            # QSHARD_LIBRARY, or the package
    python test/python/fuzz/fuzz_operators.py --calls 20000 --operator 'linear|swiglu'
    python test/python/fuzz/fuzz_operators.py --seed 4711 --calls 1 --show   # one call alone

A call is an operator and arguments, which follow from the seed alone, as long as the operators are
the same: arguments of an ordinary call (fuzz_baselines.py), some of them exchanged for others of
the schema's types (fuzz_arguments.py). Tensors lie before pages that may not be touched
(fuzz_memory.py). Each call must end in a short error that names the operator, and has written
nothing then, or in a result that depends on the arguments alone, and has written what the schema
says (fuzz_checks.py). Calls run in forked processes (fuzz_children.py), so that one that ends its
process is named and the next ones run.
"""

import argparse
import collections
import json
import random
import re
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "harness"))

import library_under_test  # noqa: F401
import torch
from fuzz_calls import schemas
from fuzz_children import run_batch
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH = 400  # calls of one process


def operator_of(seed, names):
    return random.Random(f"operator {seed}").choice(names)


def calls_of(pattern, first, count):
    """So many (seed, operator), of operators that match, from a seed on."""
    names, found, seed = list(schemas()), [], first
    wanted = re.compile(pattern)
    if not any(map(wanted.search, names)):
        raise SystemExit(f"no operator matches {pattern!r}")
    while len(found) < count:
        name = operator_of(seed, names)
        if wanted.search(name):
            found.append((seed, name))
        seed += 1
    return found


def run(calls, on_line=lambda seed, name, line: None):
    """(what was found, outcomes by operator); a finding is (kind, operator, seed, notes, text)."""
    warm_up()
    found, outcomes, done = [], collections.defaultdict(collections.Counter), 0
    while done < len(calls):
        batch = calls[done : done + BATCH]
        result = run_batch(batch)
        for line in result.lines:
            seed, name = batch[line["i"]]
            outcomes[name][line["outcome"]] += 1
            on_line(seed, name, line)
            found += [(kind, name, seed, line["notes"], text) for kind, text in line["found"]]
        done += len(result.lines)
        if result.end:
            # All calls may have ended, and left behind what the process then ended by.
            at = min(len(result.lines), len(batch) - 1)
            found.append(crash(*batch[at], result))
            outcomes[batch[at][1]]["crash"] += 1
            done += at == len(result.lines)
    return found, outcomes


def warm_up():
    """Imports what fake tensors take, once for all processes."""
    import torch._dynamo  # noqa: F401

    with FakeTensorMode() as mode:
        ops = torch.ops.qshard
        ops.dequantize(mode.from_tensor(ops.quantize(torch.ones(2, 2), "mxfp8")))


def crash(seed, name, result):
    """The finding of a call that ended its process, or did not end."""
    kind, text = result.kind(), result.summary()
    if kind == "crash":
        alone = run_batch([(seed, name)])
        if not alone.end:
            text += "; only after the calls before it"
        elif not run_batch([(seed, name)], guards=False).end:
            kind = "read or write behind a tensor"
    return kind, name, seed, {"at": result.last}, text


def grouped(found):
    """{(kind, operator, the text with its numbers as N): [findings]}"""
    groups = collections.defaultdict(list)
    for finding in found:
        kind, name, _, _, text = finding
        groups[kind, name, re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:160]].append(finding)
    return groups


def described(found):
    for (kind, name, _), findings in sorted(grouped(found).items(), key=lambda item: item[0]):
        _, _, seed, notes, text = findings[0]
        notes = ", ".join(f"{argument}: {note}" for argument, note in notes.items())
        yield f"{kind}: {name}, {len(findings)} calls, --seed {seed}\n    {notes}\n    {text}"


def show(seed, name):
    """A call's arguments and its end, in a process of its own."""
    result = run_batch([(seed, name)])
    print(f"qshard::{name}, seed {seed}")
    for line in result.lines:
        print(json.dumps(line, indent=1, ensure_ascii=False))
    if result.end:
        print(result.last, result.end, result.errors[-3000:], sep="\n")


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first call; then one more each"
    )
    parser.add_argument("--operator", default="", help="a regular expression: of these alone")
    parser.add_argument("--show", action="store_true", help="arguments and end of a few calls")
    parser.add_argument("--log", type=Path, help="one JSON line per call")
    options = parser.parse_args()
    calls = calls_of(options.operator, options.seed, options.calls)
    if options.show:
        for seed, name in calls:
            show(seed, name)
        return 0
    log = options.log.open("w", buffering=1) if options.log else None
    start = time.monotonic()

    def note(seed, name, line):
        if log:
            log.write(json.dumps({"seed": seed, "operator": name} | line) + "\n")

    found, outcomes = run(calls, note)
    for text in described(found):
        print(text)
    total = sum(outcomes.values(), collections.Counter())
    kinds = collections.Counter(kind for kind, *_ in found)
    seconds = time.monotonic() - start
    print(f"{len(calls)} calls in {seconds:.0f} s: {dict(total)}; found: {dict(kinds)}")
    never = sorted(name for name, ends in outcomes.items() if not ends["done"])
    print(f"operators that no call got through: {', '.join(never) or 'none'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
