"""Runs functions on several ranks.

Starting a process and importing torch takes seconds, so ranks are kept: worker i of a device runs
rank i of whatever world a test asks for, and every call gets a default process group of its own with
a short timeout. A hang is a failure of that test. After an error its workers run in new processes.
"""

import atexit
import contextlib
import ctypes
import datetime
import functools
import gc
import importlib
import inspect
import json
import math
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 20
JOB_S = 300
START_S = 180
COMPILERS_S = 1800  # of jobs that wait for Inductor
NO_ANSWER = "no answer"
TIMED_OUT = "Timed out"  # in gloo's error of a collective that waited too long
ANSWERED = 3  # exit code of a process that has answered and takes no more jobs
MANY_THREADS = 150  # a process of the CPU that has more is renewed
PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the child ends with its parent
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# pytest's --ranks-share-gpus sets it: worlds on GPUs may have more ranks than there are GPUs.
ranks_share_gpus = False


# ------------------------------------------------------------------------------- in the test


@dataclass(frozen=True)
class Outcome:
    """What a function did on one rank."""

    value: object = None
    error: str | None = None  # traceback, or how the process ended
    seconds: float = 0.0
    is_worn: bool = False  # the process has many threads: another is to take the next job


@dataclass(frozen=True)
class World:
    """`size` ranks on one kind of device. Worlds of different lanes can work at the same time."""

    device: str
    size: int
    lane: int = 0

    def __str__(self):
        return f"{self.device}-{self.size}"

    def run(self, function, *args, **kwargs):
        """`function(*args, **kwargs)` on every rank; the results by rank. Fails if a rank failed."""
        outcomes = self.outcomes(function, *args, **kwargs)
        # Those that ended say nothing of when: mostly after another's error.
        failed = [(o.seconds or math.inf, rank, o.error) for rank, o in enumerate(outcomes) if o.error]
        if failed:
            # The first is the cause; the others mostly say that a peer has gone. Ranks that wait for
            # each other end together, and each says where it waited.
            text = f"{function.__name__} on {self}\n"
            for i, (seconds, rank, error) in enumerate(sorted(failed)):
                is_cause = i == 0 or TIMED_OUT in error
                shown = error if is_cause else error.strip().splitlines()[-1]
                after = f" after {seconds:.1f} s" if seconds < math.inf else ""
                text += f"rank {rank}{after}: {shown}\n"
            pytest.fail(text, pytrace=False)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *args, wait_s=JOB_S, collective_s=COLLECTIVE_TIMEOUT_S, **kwargs):
        """As run(), but errors are part of the answer. `wait_s`: for ranks still at work; `collective_s`:
        how long a collective waits for other ranks."""
        job = pickle.dumps((function, args, kwargs))
        return _pool(self.device, self.lane).call(self.size, job, wait_s, collective_s)


def on_worlds(*sizes, devices=("cpu", "cuda")):
    """Parametrizes a test over worlds; those without the hardware are skipped and say so."""
    return pytest.mark.parametrize(
        "world", [_world_param(device, size) for device in devices for size in sizes]
    )


def on_ranks(*sizes, devices=("cpu", "cuda"), compiles=False):
    """Runs a test's body on every rank of worlds of these sizes. The test fails if one rank fails.
    `compiles`: by Inductor, which on a busy machine ends minutes later on one rank than on another.

    The body has the test's parameters, whose values are pickled. A test that compares what ranks return,
    or reports something from its own process, takes `on_worlds` and World.run() instead.
    """
    limits = dict(wait_s=COMPILERS_S, collective_s=COMPILERS_S) if compiles else {}

    def decorate(body):
        @functools.wraps(body)
        def test(world, **arguments):
            world.run(_Body(body.__module__, body.__name__), **limits, **arguments)

        parameters = inspect.signature(body).parameters.values()
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *parameters])
        test.on_rank = body
        return on_worlds(*sizes, devices=devices)(test)

    return decorate


@dataclass(frozen=True)
class _Body:
    """The body of a test. A worker finds it by its name: a pickled function is its name, and the test
    has taken that of the body."""

    module: str
    __name__: str

    def __call__(self, **arguments):
        getattr(importlib.import_module(self.module), self.__name__).on_rank(**arguments)


def _world_param(device, size):
    world = World(device, size)
    gpus = torch.cuda.device_count() if device == "cuda" else size
    needed = 1 if ranks_share_gpus else size
    reason = f"{world} needs {needed} GPUs, found {gpus}"
    return pytest.param(world, id=str(world), marks=pytest.mark.skipif(gpus < needed, reason=reason))


# ------------------------------------------------------------------------------- the workers


class _Worker:
    def __init__(self, device, rank):
        context = get_context("spawn")
        self.pipe, remote = context.Pipe()
        self.process = context.Process(target=_start, args=(remote, device, rank), daemon=True)
        self.process.start()
        remote.close()

    def is_ready(self):
        """Waits for a new process: importing torch takes long on a busy machine, and longer on one
        rank than on another, so that process groups would time out."""
        try:
            return self.pipe.poll(START_S) and self.pipe.recv() == "ready"
        except (EOFError, ConnectionError):
            return False

    def receive(self, wait_s):
        try:
            if self.pipe.poll(max(0, wait_s)):
                return self.pipe.recv()
            return Outcome(error=f"{NO_ANSWER} after {wait_s:.0f} s")
        except (EOFError, ConnectionError):
            self.process.join(5)
            return Outcome(error=f"the process ended with exit code {self.process.exitcode}")

    def renew(self, outcome):
        """Whether a new process takes the jobs, as the one that answered with `outcome` does not."""
        if (outcome.error or "").startswith(NO_ANSWER):
            return False
        if not outcome.error:
            with contextlib.suppress(ConnectionError):
                self.pipe.send(None)
        return self.is_ready()

    def stop(self):
        self.pipe.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Pool:
    # After the first error the others fail at their next collective, within its timeout.
    GRACE_S = 2 * COLLECTIVE_TIMEOUT_S + 10

    def __init__(self, device):
        self.device = device
        self.workers = {}  # by rank

    def call(self, size, job, wait_s, collective_s):
        new = [rank for rank in range(size) if rank not in self.workers]
        self.workers |= {rank: _Worker(self.device, rank) for rank in new}
        if not all(self.workers[rank].is_ready() for rank in new):
            self.close()
            pytest.fail(f"a test worker did not start within {START_S} s", pytrace=False)
        with tempfile.TemporaryDirectory() as folder:
            workers = [self.workers[rank] for rank in range(size)]
            for worker in workers:
                worker.pipe.send((job, size, os.path.join(folder, "store"), collective_s))
            deadline = time.monotonic() + wait_s
            outcomes = []
            for worker in workers:
                outcomes.append(worker.receive(deadline - time.monotonic()))
                if outcomes[-1].error:
                    deadline = min(deadline, time.monotonic() + self.GRACE_S)
            failed = any(outcome.error for outcome in outcomes)
            for rank, outcome in enumerate(outcomes):
                if (failed or outcome.is_worn) and not self.workers[rank].renew(outcome):
                    self.workers.pop(rank).stop()
        return outcomes

    def close(self):
        for worker in self.workers.values():
            worker.stop()
        self.workers.clear()


_pools = {}


def _pool(device, lane):
    key = device, lane
    if key not in _pools:
        _pools[key] = _Pool(device)
        atexit.register(_pools[key].close)
    return _pools[key]


def _start(pipe, device, rank):
    """A worker's process. On the CPU it only imports what the jobs need, and its forks take the jobs:
    the one after a failure is there at once. (CUDA's runtime does not survive a fork.) Every rank
    has a process of its own to fork, with its own order of sets and its own addresses."""
    # Not by conftest: there is one of that name beside the tests of clients, too.
    import library_under_test  # noqa: F401

    os.environ["TORCH_FR_BUFFER_SIZE"] = "64"  # last_collectives reads it
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        # NCCL refuses two ranks on one GPU of a host. Those of other hosts it reaches by sockets.
        os.environ["NCCL_HOSTID"] = f"host {rank // gpus}"
        # After a timeout NCCL's watchdog ends the process; it would first wait a minute for dumps.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
        return _serve(pipe, device, rank)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's default mesh is the GPUs', if there are any
    for module in ("models.fsdp2", "torch._dynamo", "torch.distributed.checkpoint"):
        importlib.import_module(module)
    while True:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            return _serve(pipe, device, rank)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:  # there are no jobs any more
            return
        if status != ANSWERED:
            pipe.send(Outcome(error=f"the process ended with exit code {status}"))


def _serve(pipe, device, rank):
    pipe.send("ready")
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            os._exit(ANSWERED)
        job, size, store, collective_s = message
        start = time.monotonic()
        try:
            torch.set_num_threads(1)  # a job may have set another number, as accelerate does
            _init_process_group(device, rank, size, store, collective_s)
            function, args, kwargs = pickle.loads(job)
            value, error = function(*args, **kwargs), None
            collect_garbage()
            dist.barrier()
            dist.destroy_process_group()
            forget_meshes()
        except BaseException:  # CheckpointException derives from it
            value, error = None, traceback.format_exc()
            if TIMED_OUT in error:
                error += last_collectives()
        is_worn = device == "cpu" and _threads() > MANY_THREADS
        pipe.send(Outcome(value, error, time.monotonic() - start, is_worn))
        if error:
            # As in a real job: the process goes, and its peers find out at their next collective.
            os._exit(ANSWERED)


def last_collectives():
    """Those that this rank began last, as torch's flight recorder has them: a rank that waits for
    another is in another collective than that."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-8:]
    return "the last collectives here, the latest at the end:\n" + "".join(
        f"  {e['process_group'][0]} #{e['collective_seq_id']} {e['profiling_name']} "
        f"{e['input_sizes']} {e['input_dtypes']}\n" for e in entries
    )


def _threads():
    """Gloo's among them: FSDP2 keeps process groups alive beyond destroy_process_group, each with three
    threads that wake up every few milliseconds. A thousand of them take a core."""
    return len(os.listdir("/proc/self/task"))


def forget_meshes():
    """DTensor's caches hand specs with the meshes of earlier jobs, and so names of their groups, to
    meshes over the same ranks. On GPUs its state of random numbers is agreed over all ranks when the
    first of them draws: by those that have none yet."""
    if "torch.distributed.tensor" in sys.modules:
        tensor = sys.modules["torch.distributed.tensor"]
        propagator = tensor.DTensor._op_dispatcher.sharding_propagator
        propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
        tensor._random._rng_tracker = None


_modules = 0


def collect_garbage():
    """Frees what a job, or a file of tests, left. What imports have made is a hundred times that, and is
    looked at once: for transformers and Inductor that takes half a second."""
    global _modules
    gc.collect()
    if len(sys.modules) > _modules:
        gc.freeze()
        _modules = len(sys.modules)


def _init_process_group(device_type, rank, size, store, collective_s):
    global _device
    index = torch.cuda.current_device() if device_type == "cuda" else None
    _device = torch.device(device_type, index)
    # No device_id: with one, meshes split the default group, which crashes in the second world of a
    # process (pytorch#192109).
    dist.init_process_group(
        BACKENDS[device_type],
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=collective_s),
    )
    if device_type == "cuda":
        # NCCL's communicator is made by the first collective, and a rank waits for the others to
        # make it without a timeout: the test would be of that.
        dist.barrier()


# ---------------------------------------------------------------------- for code on the ranks

_device = torch.device("cpu")


def device():
    """The device of this rank."""
    return _device


def full_mesh(*shape, names=None):
    """A device mesh of the given shape over the whole world; 1-D without one."""
    return dist.device_mesh.init_device_mesh(
        _device.type, shape or (dist.get_world_size(),), mesh_dim_names=names
    )


def gather_objects(value):
    """`value` of every rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def shared_folder():
    """A folder that all ranks see and that is gone afterwards."""
    folder = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    path = [folder.name if folder else None]
    dist.broadcast_object_list(path)
    try:
        yield Path(path[0])
        dist.barrier()
    finally:
        if folder:
            folder.cleanup()


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def same_on_all_ranks(fact, what):
    """A fact that decides about collectives is the same on all ranks: else the next one hangs."""
    facts = gather_objects(fact)
    assert len(set(facts)) == 1, f"{what} by rank: {facts}"
    return fact
