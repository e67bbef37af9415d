"""Mutates files that hold quantized tensors, and loads them as those of strangers are loaded.

    python test/python/fuzz/fuzz_files.py --count 10000             # QSHARD_LIBRARY, or the package
    python test/python/fuzz/fuzz_files.py --count 10000 --asan      # built with QSHARD_SANITIZE=ON
    python test/python/fuzz/fuzz_files.py --kind pickle --seed 123  # one mutation, here, with its error

Kinds: `described` (pickles whose numbers fit together more often than chance has it), `pickle`
(values of a torch.save file exchanged, records cut, bits flipped), `metadata` and `shard` (of a DCP
checkpoint). A child process takes one mutation after the other; where it dies, the next one goes
on. Each must end in an error, in the tensor that was saved, or in another that can be read. DCP
reads its metadata by pickle.load, which runs what it is told to: there only numbers change.
"""

import argparse
import collections
import copy
import faulthandler
import io
import json
import os
import pickle
import random
import re
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "harness"))

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from file_mutations import damage, described, flip, mutate_archive, mutate_metadata, saved, tensors

from qshard._runtime.classes import TensorState

OURS = ("fault", "crash", "hang")
KINDS = ("described", "pickle", "metadata", "shard")
SILENCE = 120  # seconds after which a child hangs
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
MAX_READ = 1 << 22  # elements of a view that are read: plain tensors too expand to any size


# ------------------------------------------------------------------------------ loading and reading


def is_quantized(value):
    return isinstance(value, torch.Tensor) and torch.ops.qshard.is_quantized(value)


def read(q):
    """Every way to look at a tensor, any of which may refuse. Then a write and a flush."""
    ops = torch.ops.qshard
    q = q.detach()
    planes = TensorState(q).pack()[0].numel()
    if planes > 1 << 26:
        raise AssertionError(f"{planes} bytes of planes from a small file")
    if q.numel() > MAX_READ or q.is_meta:
        return
    reads = (ops.dequantize, ops.codes, ops.scale_inv, ops.tensor_scale_inv, ops.columnwise_codes)
    reads += (ops.columnwise_scale_inv, ops.master, torch.clone, repr, copy.deepcopy, saved)
    reads += (lambda q: TensorState(q).storage_bytes(), lambda q: q.to(torch.bfloat16))
    reads += (lambda q: q.to("cpu", copy=True),)
    reads += (lambda q: (q + 1).sum(), lambda q: q.to("meta"), lambda q: q[:1], lambda q: q.t())
    reads += (lambda q: F.linear(torch.ones(2, q.shape[-1], dtype=q.dtype), q),)
    reads += (lambda q: q.mul_(2), lambda q: ops.flush([q]), ops.dequantize, ops.codes)
    for each in reads:
        try:
            result = each(q)
            if isinstance(result, torch.Tensor) and not is_quantized(result) and not result.is_meta:
                result.clone()
        except Exception as error:
            if type(error) not in REFUSALS or not names_the_fault(error):
                raise AssertionError("reading a loaded tensor") from error


class Pickles:
    """Mutations of files that torch.save wrote."""

    def __init__(self, kind):
        self.whole = list(tensors())
        self.values = [saved(q) for q in self.whole]
        self.described = kind == "described"

    def mutate(self, rng):
        at = rng.randrange(len(self.whole))
        self.expected = None if self.described else self.whole[at]
        whole = self.whole[at]
        return described(rng, whole) if self.described else mutate_archive(rng, self.values[at])

    def load(self, file):
        loaded = torch.load(io.BytesIO(file), weights_only=True)
        if not is_quantized(loaded):
            return "other"
        same = self.expected is not None and is_same(loaded, self.expected)
        read(loaded)
        return "right" if same else "readable"


def is_same(a, b):
    ops = torch.ops.qshard
    bytes_a, _, *rest_a, _ = TensorState(a.detach()).pack()
    bytes_b, _, *rest_b, _ = TensorState(b.detach()).pack()
    return rest_a == rest_b and a.shape == b.shape and torch.equal(bytes_a, bytes_b)


class Checkpoints:
    """Mutations of a DCP checkpoint, loaded into a model that holds other values."""

    def __init__(self, kind):
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="qshard-fuzz-"))
        self.model = self.make_model(1.0)
        dcp.save(self.model.state_dict(), checkpoint_id=self.folder, no_dist=True)
        self.files = {path: path.read_bytes() for path in self.folder.iterdir()}
        self.values = {k: self.value(v) for k, v in self.model.state_dict().items()}
        self.shard = next(path for path in self.files if path.suffix == ".distcp")
        torch.set_printoptions(threshold=10)

    @staticmethod
    def make_model(scale):
        ops = torch.ops.qshard
        torch.manual_seed(1)
        model = torch.nn.Module()
        for format in ops.formats():
            rows = 32 if format == "mxfp8_1x32" else 6
            for keep_master in (False, True):
                q = ops.quantize(torch.randn(rows, 20) * scale, format, keep_master=keep_master)
                name = f"{format}_{keep_master}"
                model.register_parameter(name, torch.nn.Parameter(q, requires_grad=False))
        return model

    @staticmethod
    def value(tensor):
        ops = torch.ops.qshard
        return TensorState(tensor.detach()).export_view().clone() if is_quantized(tensor) else tensor.clone()

    def mutate(self, rng):
        if self.kind == "metadata":
            metadata = pickle.loads(self.files[self.folder / ".metadata"])
            mutate_metadata(rng, metadata)
            return pickle.dumps(metadata)
        data = self.files[self.shard]
        chance = rng.random()
        if chance < 0.2:
            return damage(rng, data)
        # The pickles, where they are: what lies between is tensor data, padding and checksums.
        starts = [m.start() for m in re.finditer(rb"\x80\x02ctorch", data)]
        start = rng.choice(starts)
        return data[:start] + flip(rng, data[start : start + 250]) + data[start + 250 :]

    def load(self, mutated):
        for path, data in self.files.items():
            changed = path == (self.shard if self.kind == "shard" else self.folder / ".metadata")
            path.write_bytes(mutated if changed else data)
        model = self.make_model(0.5)
        state = model.state_dict()
        error = None
        try:
            dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        except BaseException as caught:  # DCP's CheckpointException is no Exception
            if isinstance(caught, KeyboardInterrupt):
                raise
            error = caught
        loaded = {k: self.value(v) for k, v in state.items()}
        for q in state.values():
            read(q)
        if error is not None:
            raise error
        same = all(torch.equal(loaded[k], v) for k, v in self.values.items())
        return "right" if same else "readable"


# ------------------------------------------------------------------------------- child and parent


def names_the_fault(error):
    """Whether it says something, and not what an assertion in torch's or our insides says."""
    text = f"{type(error).__name__}: {error}"
    return text != "RuntimeError: " and "INTERNAL ASSERT" not in text


def try_one(target, kind, seed):
    """(outcome, error) of one mutation."""
    file = target.mutate(random.Random(f"{kind} {seed}"))
    try:
        return target.load(file), ""
    except AssertionError:
        return "fault", traceback.format_exc()[-2000:]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        ours = any("qshard" in frame.filename for frame in frames) or "_qshard_" in str(error)
        text = f"{type(error).__name__}: {error}"
        if ours and ("allocate" in text or isinstance(error, MemoryError)):
            return "fault", text[:2000]
        if not names_the_fault(error):
            return ("fault" if ours else "torch"), text[:2000]
        return "error", text[:300]


def kind_of(kinds, seed):
    return kinds[seed % len(kinds)]


def make_target(kind):
    return (Pickles if kind in ("described", "pickle") else Checkpoints)(kind)


def run_child(kinds, first, last):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import library_under_test  # noqa: F401
    targets = {kind: make_target(kind) for kind in kinds}
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tensors print does not mix with results
    for seed in range(first, last):
        kind = kind_of(kinds, seed)
        out.write(json.dumps({"start": seed}) + "\n")
        faulthandler.dump_traceback_later(SILENCE - 5)
        outcome, error = try_one(targets[kind], kind, seed)
        faulthandler.cancel_dump_traceback_later()
        result = {"kind": kind, "seed": seed, "outcome": outcome, "error": error}
        out.write(json.dumps(result) + "\n")


def child_environment(asan):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if asan:
        # libstdc++ too: Python brings none, and ASan looks for what throws when it starts.
        libraries = [
            subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
            for name in ("libasan.so", "libstdc++.so.6")
        ]
        environment["LD_PRELOAD"] = " ".join(libraries)
        environment["ASAN_OPTIONS"] = (
            "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048:"
            "hard_rss_limit_mb=6000:handle_segv=1"
        )
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    return environment


def messages(process):
    """What a child says, line by line; None where it is silent for too long."""
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    buffered = b""
    deadline = time.monotonic() + 3 * SILENCE  # torch and the corpus come first
    while True:
        if not selector.select(max(0.0, deadline - time.monotonic())):
            yield None
            return
        block = os.read(process.stdout.fileno(), 1 << 16)
        if not block:
            return
        *lines, buffered = (buffered + block).split(b"\n")
        for line in lines:
            yield json.loads(line)
        deadline = time.monotonic() + SILENCE


def run(kinds, first, last, asan=False, log=None):
    """Outcomes of mutations [first, last), counted by kind, and (kind, seed, outcome, text) of each
    that went wrong."""
    counts = {kind: collections.Counter() for kind in kinds}
    wrong = []
    while first < last:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", ",".join(kinds), str(first), str(last)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(asan),
            )
            hangs = False
            for message in messages(process):
                if message is None:
                    hangs = True
                    process.kill()
                elif "start" in message:
                    first = message["start"]
                else:
                    first = message["seed"] + 1
                    counts[message["kind"]][message["outcome"]] += 1
                    if log:
                        log.write(json.dumps(message) + "\n")
                    if message["outcome"] in ("fault", "torch"):
                        wrong.append(tuple(message.values()))
            status = process.wait()
            if status == 0:
                return counts, wrong
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace")[-20000:]
        if status == 1 and "Traceback" in text:  # in this program, not in what it tries
            raise RuntimeError(text)
        ours = "libqshard" in text or "qshard::" in text
        outcome = "hang" if hangs else "crash" if ours else "crash in torch"
        kind = kind_of(kinds, first)
        counts[kind][outcome] += 1
        wrong.append((kind, first, outcome, text))
        first += 1
    return counts, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="mutations of all kinds together")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each kind")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, help="this mutation alone, in this process")
    parser.add_argument("--asan", action="store_true", help="children run under AddressSanitizer")
    parser.add_argument("--log", type=Path, help="one JSON line per mutation")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kinds, first, last = options.child
        return run_child(kinds.split(","), int(first), int(last))
    if options.seed is not None:
        import library_under_test  # noqa: F401
        print(*try_one(make_target(options.kind), options.kind, options.seed))
        return 0
    kinds = (options.kind,) if options.kind else KINDS
    log = options.log.open("w", buffering=1) if options.log else None
    last = options.first + options.count
    counts, wrong = run(kinds, options.first, last, options.asan, log)
    for kind, seed, outcome, text in wrong:
        print(f"--- --kind {kind} --seed {seed}: {outcome}\n{text}")
    for kind in kinds:
        print(f"{kind}: {counts[kind].total()} mutations, {dict(counts[kind])}")
    bad = [w for w in wrong if w[2] in OURS]
    print(f"{options.count} mutations, {len(bad)} of them ours to mend")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
