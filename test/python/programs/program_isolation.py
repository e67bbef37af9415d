"""What makes a random program depend on its seed alone, whatever ran before it in its process.

Generators are seeded, caches of earlier programs emptied, and garbage is collected between programs
only. Unwritten memory holds NaNs, of the CPU at each allocation, on a GPU what the caching
allocator has free, before each program and again before each step. On a GPU streams also get to a step
late, others in each step: what does not wait for a stream that it needs finds NaNs, or older values.
"""

import contextlib
import ctypes
import gc
import os
import random
from pathlib import Path

import torch
from dist_helpers import device, forget_meshes
from program_models import OPTIMIZERS

# Read when a process first multiplies. The default is as large, but one for all streams' sake.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SMALL = 1 << 20  # bytes: CUDA's caching allocator has pools of their own for up to that
STREAMS_OF_PRIORITY = 32  # torch hands these out in turn
SLEEPS = (0, 0, 200_000, 2_000_000)  # cycles: up to a millisecond


@contextlib.contextmanager
def isolated(seed):
    """For the time of one program."""
    forget_programs()
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's generators, too
    if device().type == "cuda":
        fill_gpu_memory()
    gc.disable()  # what it frees, and when, would depend on earlier programs
    try:
        with junk_in_new_memory():
            yield
    finally:
        gc.enable()


def forget_programs():
    gc.collect()
    forget_meshes()
    end_failed_steps()
    if device().type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def end_failed_steps():
    """A step that raised is under way, for the hooks of optimizers, until the next one. And a class of
    optimizers calls hooks once it has an instance, for those that derive from it, too."""
    for make in OPTIMIZERS.values():
        make([torch.zeros(1)])
    torch.optim.SGD([torch.zeros(1)], lr=0.0).step()


# ------------------------------------------------------------------------------ of the CPU


@contextlib.contextmanager
def junk_in_new_memory():
    """torch's own flag for its CPU allocator: float32 is NaN, every second bfloat16 is, and other types
    have values that no program writes."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_cpu_allocator_do_junk_fill")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


# ------------------------------------------------------------------------------- of a GPU


def fill_gpu_memory():
    """Some memory for each stream that a program may use. Torch has two sets of them, and hands those of
    a set out in turn: each program gets the same ones."""
    streams = [torch.cuda.current_stream()]
    for priority in (0, -1):
        of_priority = [torch.cuda.Stream(priority=priority) for _ in range(STREAMS_OF_PRIORITY)]
        last = max(stream.stream_id for stream in of_priority)
        while torch.cuda.Stream(priority=priority).stream_id != last:
            pass
        streams += of_priority
    blocks = []
    for stream in streams:
        with torch.cuda.stream(stream):
            sizes = [SMALL] * 2
            if stream == streams[0]:
                sizes += [SMALL] * 6 + [9 * SMALL] * 2 + [32 * SMALL]
            blocks += [nans(size) for size in sizes]
    del blocks
    torch.cuda.synchronize()


def nans(size):
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


def fill_free_gpu_memory(streams):
    """What the allocator has free for these streams."""
    by_pointer = {stream.cuda_stream: stream for stream in streams}
    found = []
    for segment in torch.cuda.memory_snapshot():
        stream = by_pointer.get(segment["stream"])
        if stream is None or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for block in segment["blocks"]:
            size = block["size"] if block["state"] == "inactive" else 0
            while size > 0:  # a small segment that is free as a whole is larger than what is small
                part = min(size, SMALL) if segment["segment_type"] == "small" else size
                found.append((part, stream))
                size -= part
    # The smallest block that is large enough is taken, so each of these gets one of its own size.
    blocks = []
    for size, stream in sorted(found, key=lambda pair: pair[0]):
        with torch.cuda.stream(stream):
            blocks.append(nans(size))


def streams_of(models):
    """The current stream, and those of FSDP2."""
    streams = [torch.cuda.current_stream()]
    for model in models:
        for module in model.modules():
            state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
            context = getattr(state, "_comm_ctx", None)
            known = vars(context).values() if context else ()
            streams += [stream for stream in known if isinstance(stream, torch.cuda.Stream)]
    return list({stream.cuda_stream: stream for stream in streams}.values())


def before_step(models, seed, number, delays):
    """What is done before a step of a program on a GPU."""
    if device().type != "cuda":
        return
    streams = streams_of(models)
    fill_free_gpu_memory(streams)
    rng = random.Random(f"{seed} {number}")
    for stream in streams if delays else ():
        cycles = rng.choice(SLEEPS)
        if cycles:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
