"""I1: PyTorch's own op database with quantized inputs (op_sweep.py compares, in other processes).

Every op gives what it gives for dequantize(q), in place and out= included, or raises an error that
names it. A process that dies is a failure that names the op it died in.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

CHUNKS = 8
OPS_PER_CHUNK = -(-len(op_db) // CHUNKS)
TIMEOUT_S = 900  # for a chunk; on an idle core it takes 5 s

_results = []


def run_worker(log, first, last):
    """Sweeps op_db[first:last]; returns (what the process said when it died or '', lines)."""
    worker = Path(__file__).with_name("op_sweep.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.run(
        [sys.executable, worker, log, str(first), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    died = "" if process.returncode == 0 else f"exit {process.returncode}: {process.stdout[-800:]}"
    return died, lines


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ops_equal_their_values_or_raise_by_name(chunk, tmp_path):
    first, last = chunk * OPS_PER_CHUNK, min(len(op_db), (chunk + 1) * OPS_PER_CHUNK)
    failures = []
    attempt = 0
    while first < last:
        died, lines = run_worker(tmp_path / f"{attempt}.jsonl", first, last)
        results = [line for line in lines if "end" in line]
        _results.extend(results)
        failures += [failure for result in results for failure in result["failures"]]
        if not died:
            break
        assert lines, died
        failures.append(f"{lines[-1]['op']} ended its process, {died}")
        first = lines[-1]["begin"] + 1 if "begin" in lines[-1] else last
        attempt += 1
    assert not failures, "\n" + "\n".join(failures)


def outcome(result):
    """One word for an op: what the worst of its calls did."""
    for word in ("refused", "fallback", "native"):
        if result["calls"][word]:
            return word
    return "raises as plain" if result["calls"]["raises as plain"] else "no matrix argument"


def test_summary(report):
    if len(_results) < len(op_db):
        pytest.skip("the whole sweep did not run")
    ops, calls = Counter(map(outcome, _results)), Counter()
    for result in _results:
        calls.update(result["calls"])
    count = lambda c: ", ".join(f"{n} {word}" for word, n in c.most_common())  # noqa: E731
    report.append(f"op sweep, torch {torch.__version__}: {len(_results)} ops: {count(ops)}")
    report.append(f"  calls: {count(calls)}")
    report.extend(f"  refused: {refusal}" for r in _results for refusal in r["refusals"][:1])
    for word in ("no matrix argument", "raises as plain"):
        names = [r["op"] for r in _results if outcome(r) == word]
        report.append(f"  {word}: {' '.join(names)}")
    assert ops["native"] + ops["fallback"] > 500
