"""Processes that make the calls of fuzz_operators.py, forked from one that has imported torch."""

import ctypes
import faulthandler
import functools
import gc
import json
import logging
import mmap
import os
import resource
import select
import signal
import struct
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from fuzz_calls import schemas
from fuzz_checks import try_call
from fuzz_memory import Memory

SILENCE = 20  # seconds after which a call hangs
ADDRESS_SPACE = 1 << 30  # bytes more than a child has when it starts
PLACE = 1 << 16  # bytes in which a child says what it is at
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# What faulthandler writes of Python's stack.
STACK = ("  File", "  <no Python", "Extension", "Current thread", "Thread 0x", "Fatal Python")


@dataclass
class Batch:
    """What became of the calls of one child."""

    lines: list  # of the calls that ended; the next call is the one that ended the child
    end: str  # how the child ended; "" if all calls did
    last: str  # what it was at
    errors: str  # what it wrote to stderr

    def kind(self):
        return "hang" if self.end.startswith("hang") else "crash"

    def summary(self):
        written = [s for s in self.errors.splitlines() if s.strip() and not s.startswith(STACK)]
        return " | ".join([self.end, *written[-3:]])[:300]


def run_batch(calls, guards=True):
    """`calls`: (seed, operator). `guards`: tensors lie before pages that may not be touched."""
    place = mmap.mmap(-1, PLACE)
    read, write = os.pipe()
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                work(calls, place, write, errors, guards)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(write)
        lines, hangs = listen(read, place, child)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        text = errors.read().decode("utf-8", "replace")
    _, length = struct.unpack("qq", place[:16])
    last = place[16 : 16 + length].decode("utf-8", "replace")
    end = "" if status == 0 else f"exit code {status}"
    if status < 0:
        end = f"hang of more than {SILENCE} s" if hangs else signal.Signals(-status).name
    return Batch(lines, end, last, text)


def listen(read, place, child):
    """The lines that a child writes until it ends, or is silent for too long and is ended."""
    data, at, since, hangs = b"", b"", time.monotonic(), False
    while True:
        if place[:16] != at:
            at, since = place[:16], time.monotonic()
        if time.monotonic() - since > SILENCE and not hangs:
            hangs = True
            os.kill(child, signal.SIGUSR1)  # its stack, for --show
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
        if select.select([read], [], [], 1)[0]:
            block = os.read(read, 1 << 16)
            if not block:
                break
            data += block
    os.close(read)
    return [json.loads(line) for line in data.split(b"\n")[:-1]], hangs


def work(calls, place, pipe, errors, guards):
    """Makes calls one after the other, and writes a line on each."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(errors.fileno(), 2)
    faulthandler.enable(errors)
    faulthandler.register(signal.SIGUSR1, errors)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    gc.freeze()  # what there is now need not be looked at after each call
    memory, known = Memory(guards), schemas()

    def tell(i, text):
        """Before what may end this process."""
        data = text.encode("utf-8", "backslashreplace")[: PLACE - 16]
        place[: 16 + len(data)] = struct.pack("qq", i, len(data)) + data

    with os.fdopen(pipe, "w", buffering=1) as out:
        for i, (seed, name) in enumerate(calls):
            try:
                told = functools.partial(tell, i)
                outcome, notes, found, text = try_call(known[name], seed, memory, told)
            except Exception as error:
                outcome, notes, text = "error", {}, ""
                found = [("the fuzzer's own", fault_of_ours(error))]
            line = {"i": i, "outcome": outcome, "notes": notes, "found": found, "text": text[:400]}
            out.write(json.dumps(line) + "\n")


def fault_of_ours(error):
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return f"{type(error).__name__}: {str(error)[:200]} at {', '.join(places)}"
