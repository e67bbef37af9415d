"""PyTorch's own tests of FSDP1, plain and with every nn.Linear quantized at each use: which pass plain only.

    python test/upstream/compare.py …/pytorch/test/distributed/fsdp/test_fsdp_core.py … [--format FORMAT]

The files must be those of the installed torch. They want two GPUs or more; on machines without one they
run on CPU, over gloo, as far as they do there (startup/on_cpu.py). `-k` as of pytest. What was printed is
in the folder --logs. Exit status 1 if something passes plain only, and DIFFERENCES does not say why.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch

STARTUP = Path(__file__).parent / "startup"
ROOT = Path(__file__).parent.parent.parent

# By class and function, as in the file: why a test cannot pass with other numbers than plain ones.
DIFFERENCES = {
    "TestClipGradNorm.test_low_precision_grads": "fp16 gradients times an fp16 factor are at most "
    "max_norm but for their rounding: 2.502 of 2.5",
}


def run(file: Path, format: str, done: dict[str, str], log: Path, args) -> bool:
    """Runs the tests of a file that are not done; False if that took too long."""
    paths = [str(STARTUP), str(ROOT), str(file.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "QSHARD_UPSTREAM_FORMAT": format,
        "QSHARD_UPSTREAM_ON_CPU": "" if torch.cuda.is_available() else "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file.name]
    command += [f"--rootdir={file.parent}", f"--junitxml={log}.xml"]
    command += ["-k", args.k] if args.k else []
    for name in done:
        command += ["--deselect", f"{file.name}::{name}"]
    with open(f"{log}.log", "a") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=file.parent, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests have spawned
            process.wait()
            return False
    return True


def outcomes(file: Path, format: str, args) -> dict[str, str]:
    """passed, failed or skipped, by the test's name. `format`: "" for plain."""
    log, found = args.logs / f"{file.stem}-{format or 'plain'}", {}
    for old in args.logs.glob(f"{log.name}.*"):
        old.unlink()
    while True:
        if not run(file, format, found, log, args):
            print(f"{file.name}, {format or 'plain'}: stopped after {args.seconds} s", flush=True)
            return found
        left = False
        for case in ElementTree.parse(f"{log}.xml").iter("testcase"):
            kinds = {child.tag: child.get("message", "") for child in case}
            # A class whose tests share processes ends with the first that fails: once more, without it.
            if kinds.get("skipped", "").startswith("Previous test failed"):
                left = True
                continue
            name = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"
            failed = kinds.keys() & {"failure", "error"}
            found[name] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        if not left:
            return found


def reason_of(name: str) -> str:
    """`name`: with what torch appends for the device and for parameters."""
    found, function = name.split("::")
    for known, reason in DIFFERENCES.items():
        test_class, test = known.split(".")
        if found.startswith(test_class) and function.startswith(test):
            return reason
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--format", default="float8_blockwise")
    parser.add_argument("-k", help="only tests that match, as of pytest")
    parser.add_argument("--seconds", type=float, default=900, help="for one file, one way")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "qshard-upstream")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    where = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {where}; logs in {args.logs}", flush=True)
    unexplained = False
    for file in map(Path.resolve, args.files):
        plain, dynamic = (outcomes(file, format, args) for format in ("", args.format))
        for way, found in (("plain", plain), (args.format, dynamic)):
            counts = Counter(found.values())
            line = ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped"))
            print(f"{file.name}, {way}: {line}", flush=True)
        for name in plain:
            if plain[name] == "passed" != dynamic.get(name):
                reason = reason_of(name)
                unexplained |= not reason
                print(f"  passes plain only: {name}{reason and ': '}{reason}", flush=True)
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
