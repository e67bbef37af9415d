"""Loads the library while another thread imports extension modules, many times.

    python load_beside_imports.py LIBRARY [FILE] [--where main|worker] [--runs 100]

Both need the dynamic loader's lock and the GIL; what takes them in another order hangs. Importing torch
takes seconds, so this process does it once, and each run is a fork of it. After load_library a run reads
FILE, a quantized tensor that torch.save wrote, and looks for what loading installs. Without FILE the
library is one that refuses to load, and a run looks for its warning.
"""

import argparse
import os
import signal
import sys
import threading
import time
import warnings
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

import torch

HANGS_AFTER_S = 30


def extension_modules():
    """Specs of some that nothing here has imported."""
    specs = [PathFinder.find_spec(name) for name in sorted(sys.stdlib_module_names - sys.modules.keys())]
    found = [spec for spec in specs if spec is not None and (spec.origin or "").endswith(".so")]
    return [spec for spec in found if "test" not in spec.name and spec.name != "_tkinter"][:8]


def import_again_and_again(specs, is_started, is_over):
    while not is_over.is_set():
        for spec in specs:
            module_from_spec(spec)
            is_started.set()


def load(library, file, failures):
    said = []

    def showwarning(message, *args, **kwargs):
        time.sleep(0.01)  # the other thread's turn
        said.append(str(message))

    warnings.showwarning = showwarning
    try:
        torch.ops.load_library(library)
        if file is None:
            deadline = time.monotonic() + 10  # the main thread may be at it
            while not said and time.monotonic() < deadline:
                time.sleep(0.01)
            (line,) = said
            assert "is not loaded: " in line, line
            return
        assert hasattr(torch.Tensor, "fsdp_pre_all_gather"), "no hooks after load_library"
        tensor = torch.load(file)
        assert torch.ops.qshard.is_quantized(tensor) and hasattr(tensor, "fsdp_pre_all_gather")
        assert tensor.tolist() == torch.load(file).tolist()
        assert not said and sys.getprofile() is None
    except BaseException as error:
        failures.append(f"{type(error).__name__}: {error}")


def race(library, file, where, specs):
    is_started, is_over, failures = threading.Event(), threading.Event(), []
    importer = threading.Thread(target=import_again_and_again, args=(specs, is_started, is_over))
    importer.start()
    is_started.wait()
    if where == "main":
        load(library, file, failures)
    else:
        worker = threading.Thread(target=load, args=(library, file, failures))
        worker.start()
        worker.join()
    is_over.set()
    importer.join()
    return failures


def in_fork(*args):
    """What a fork says, "" if all went well."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        failures = race(*args)
        os.write(writer, "; ".join(failures).encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + HANGS_AFTER_S
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"hangs: not done after {HANGS_AFTER_S} s"
    with os.fdopen(reader) as text:
        return text.read() or (f"ended with status {status}" if status else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--where", choices=["main", "worker"], default="main")
    parser.add_argument("--runs", type=int, default=100)
    args = parser.parse_args()
    specs = extension_modules()
    assert specs, "no extension modules to import"
    sys.setswitchinterval(1e-4)  # threads take turns as often as they can
    for run in range(args.runs):
        if said := in_fork(args.library, args.file, args.where, specs):
            sys.exit(f"run {run} of {args.runs} on the {args.where} thread: {said}")
    print(f"{args.runs} runs")


if __name__ == "__main__":
    main()
