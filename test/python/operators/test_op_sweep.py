"""I1: PyTorch's own op database with quantized inputs (op_sweep.py compares, in other processes).

Every op gives what it gives for dequantize(q), in place and out= included, or raises an error that
names it. A process that dies is a failure that names the op it died in.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

BUDGET_S = 60
CHUNKS = 2  # op_db[chunk::CHUNKS]; they run side by side
TIMEOUT_S = 1800  # for a chunk; on an idle core it takes 25 s

_results = []


def run_worker(log, first):
    """Sweeps op_db[first::CHUNKS]; returns (what the process said when it died or '', lines)."""
    worker = Path(__file__).with_name("op_sweep.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.run(
        [sys.executable, worker, log, str(first), str(CHUNKS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    died = "" if process.returncode == 0 else f"exit {process.returncode}: {process.stdout[-800:]}"
    return died, lines


def sweep(chunk, folder):
    """(results, failures) of a chunk, whatever its processes die of."""
    results, failures = [], []
    first = chunk
    while first < len(op_db):
        died, lines = run_worker(folder / f"{first}.jsonl", first)
        results += [line for line in lines if "end" in line]
        if not died:
            break
        assert lines, died
        failures.append(f"{lines[-1]['op']} ended its process, {died}")
        first = lines[-1]["begin"] + CHUNKS if "begin" in lines[-1] else len(op_db)
    failures += [failure for result in results for failure in result["failures"]]
    return results, failures


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("op_sweep")
    with ThreadPoolExecutor(CHUNKS) as pool:
        yield [pool.submit(sweep, chunk, folder) for chunk in range(CHUNKS)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ops_equal_their_values_or_raise_by_name(chunk, sweeps):
    results, failures = sweeps[chunk].result()
    _results.extend(results)
    assert not failures, "\n" + "\n".join(failures)


def outcome(result):
    """One word for an op: what the worst of its calls did."""
    for word in ("refused", "fallback", "native"):
        if result["calls"][word]:
            return word
    return "raises as plain" if result["calls"]["raises as plain"] else "no matrix argument"


def test_most_ops_of_torch_run(report):
    if len(_results) < len(op_db):
        return  # -k has chosen some chunks of the sweep
    _results.sort(key=lambda result: result["end"])
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
