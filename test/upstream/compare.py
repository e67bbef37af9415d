"""PyTorch's own tests, plain and with every nn.Linear quantized: which pass plain only.

    python test/upstream/compare.py …/pytorch/test/distributed/fsdp/test_fsdp_core.py …
    python test/upstream/compare.py --weights quantized …/_composable/fsdp/test_fully_shard_training.py …

In tests of FSDP1 the weights stay plain and are quantized at each use (--weights dynamic); in those of FSDP2
and DCP the parameters are quantized as modules are made. The files should be those of the installed torch.
They want two GPUs or more; on machines without one they run on CPU, over gloo, as far as they do there
(startup/on_cpu.py). `-k` as of pytest. What was printed is in the folder --logs. Exit status 1 if
something passes plain only, and DIFFERENCES does not say why.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

STARTUP = Path(__file__).parent / "startup"
ROOT = Path(__file__).parent.parent.parent

_MIXED = "test_mixed_precision_e2e_full_shard_mp"
_PARALLELIZED = "parallelize_module after quantize_ is refused by name"
# By class and function, as in the file: why a test cannot pass with other numbers than plain ones.
DIFFERENCES = {
    "TestClipGradNorm.test_low_precision_grads": "fp16 gradients times an fp16 factor are at most "
    "max_norm but for their rounding: 2.502 of 2.5",
    **dict.fromkeys(
        [
            f"TestFSDPMixedPrecisionSharded.{_MIXED}_{policy}_offload_{offload}_fp64"
            for policy in ("no_mp", "only_reduce")
            for offload in ("false", "true")
        ],
        "computes in fp64, which no quantized weight does: refused by name",
    ),
    **dict.fromkeys(
        [
            "TestFSDPDifferentSubmodulePrecision.test_float16_on_one_submodule_skip_inputs_error",
            "TestFSDPDifferentSubmodulePrecision.test_submodules_with_different_precisions_error",
            "TestFSDPMixedPrecisionIgnoredModules.test_mixed_precision_with_ignored_module",
        ],
        "wants nn.Linear's error for inputs of another dtype than the weight's, which quantized ones take",
    ),
    **dict.fromkeys(
        [
            f"TestFullyShardMixedPrecisionTraining.{test}"
            for test in ("test_compute_dtype", "test_reduce_dtype", "test_grad_acc_with_reduce_dtype")
        ],
        "the reference's weights are rounded to bf16 before they are quantized",
    ),
    "TestFullyShardAllGatherExtensions": "a tensor subclass of its own takes the weights' place",
    "TestFullyShardStateDictMultiProcess.test_dp_state_dict": "Shard(1) is refused by name",
    "TestFullyShardStateDictMultiProcess.test_2d_state_dict": _PARALLELIZED,
    "TestFullyShardStateDictMultiProcess.test_dp_tp_state_dict": _PARALLELIZED,
}


def environment(file: Path, format: str, args) -> dict[str, str]:
    paths = [str(STARTUP), str(ROOT), str(file.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "QSHARD_UPSTREAM_FORMAT": format,
        "QSHARD_UPSTREAM_WEIGHTS": args.weights,
        "QSHARD_UPSTREAM_ON_CPU": "" if torch.cuda.is_available() else "1",
    }


def pytest_of(file: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={file.parent}", *more]


def tests_of(file: Path, args) -> list[str]:
    """As class::function, with what torch appends for devices and parameters."""
    command = pytest_of(file, "--collect-only", file.name, *(["-k", args.k] if args.k else []))
    listed = subprocess.run(
        command, env=environment(file, "", args), cwd=file.parent, capture_output=True, text=True
    )
    names = [line.partition("::")[2] for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        print(f"{file.name}: no tests\n{listed.stdout[-2000:]}", flush=True)
    return names


def run(file: Path, format: str, names: list[str], log: Path, args) -> None:
    """Runs tests of a file in a process of their own, for args.seconds at most."""
    command = pytest_of(file, f"--junitxml={log}.xml", *(f"{file.name}::{name}" for name in names))
    with open(f"{log}.log", "a") as output:
        process = subprocess.Popen(
            command, env=environment(file, format, args), cwd=file.parent, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests have spawned
            process.wait()
            print(f"{log.name}: stopped after {args.seconds} s", flush=True)


def outcomes(file: Path, format: str, part: int, names: list[str], args) -> dict[str, str]:
    """passed, failed, skipped, or ended (with its process), by the test's name. `format`: "" for plain."""
    log, found = args.logs / f"{file.stem}-{format or 'plain'}-{part}", {}
    Path(f"{log}.log").unlink(missing_ok=True)
    while left := [name for name in names if name not in found]:
        results = Path(f"{log}.xml")
        results.unlink(missing_ok=True)
        run(file, format, left, log, args)
        if not results.exists():
            break
        before = len(found)
        for case in ElementTree.parse(results).iter("testcase"):
            kinds = {child.tag: child.get("message", "") for child in case}
            # A class whose tests share processes ends with the first that fails: once more, without it.
            if kinds.get("skipped", "").startswith("Previous test failed"):
                continue
            name = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"
            failed = kinds.keys() & {"failure", "error"}
            found[name] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        if len(found) == before:
            break
    return {**dict.fromkeys(names, "ended"), **found}


def reason_of(name: str) -> str:
    """`name`: with what torch appends for the device and for parameters."""
    found, function = name.split("::")
    for known, reason in DIFFERENCES.items():
        test_class, _, test = known.partition(".")
        if found.startswith(test_class) and function.startswith(test):
            return reason
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--format", default="float8_blockwise")
    parser.add_argument("--weights", choices=("dynamic", "quantized"), default="dynamic")
    parser.add_argument("-k", help="only tests that match, as of pytest")
    parser.add_argument("--jobs", type=int, default=1, help="parts of a file that run beside each other")
    parser.add_argument("--seconds", type=float, default=900, help="for one part, one way")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "qshard-upstream")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    where = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {where}; logs in {args.logs}", flush=True)
    files = [file.resolve() for file in args.files]
    with ThreadPoolExecutor(args.jobs) as pool:
        names = dict(zip(files, pool.map(lambda file: tests_of(file, args), files)))
        parts = {
            (file, format): [
                pool.submit(outcomes, file, format, part, names[file][part :: args.jobs], args)
                for part in range(min(args.jobs, len(names[file])))
            ]
            for file in files
            for format in ("", args.format)
        }
        ways = {
            way: {name: outcome for part in done for name, outcome in part.result().items()}
            for way, done in parts.items()
        }
    unexplained = False
    for file in files:
        plain, quantized = ways[file, ""], ways[file, args.format]
        for way, found in (("plain", plain), (args.format, quantized)):
            counts = Counter(found.values())
            line = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
            print(f"{file.name}, {way}: {line}", flush=True)
        for name in plain:
            if plain[name] == "passed" != quantized.get(name):
                reason = reason_of(name)
                unexplained |= not reason
                print(f"  passes plain only: {name}{reason and ': '}{reason}", flush=True)
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
