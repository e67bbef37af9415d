"""The model beside the recorded steps.

Links over TCP have the rate that the run's plain bf16 step says: its bytes over its whole time, which is a lower bound.
The profiles that rates come from are those of 2026-11-25-h200.md and 2026-11-24-h100.md; the other runs are other days,
machines, numbers of GPUs, meshes and links.
"""

import functools

from model_shapes import SLICE
from step_model import PLAIN, RECORD, Gpu, Job

MOST = 0.10


def job_of(run: dict) -> Job:
    replicas, shards, tensor = run["mesh"]
    gpu = Gpu(run["gpus"].split()[1])
    link = gpu.nvlink if run["over"] == "NVLink" else bytes_of_plain(run) / plain_of(run)["ms"] * 1e3
    return Job(
        SLICE, run["configuration"], shards, link, gpu, replicas, tensor,
        tokens=run["tokens"], gradients=run["gradients"],
    )  # fmt: skip


def plain_of(run: dict) -> dict:
    """bf16 of the same run."""
    same = ("gpus", "mesh", "over", "source")
    wanted = [r for r in RECORD["runs"] if all(r[k] == run[k] for k in same)]
    return next(r for r in wanted if r["configuration"] == r["gradients"] == PLAIN)


def bytes_of_plain(run: dict) -> float:
    """Bytes that a rank sends in a step of bf16: gathers twice, gradients once."""
    shards = run["mesh"][1]
    return 3 * 2 * SLICE.numel * (shards - 1) / shards


@functools.cache
def rows() -> list[dict]:
    found = []
    for run in RECORD["runs"]:
        ms = job_of(run).step().seconds * 1e3
        off = ms / run["ms"] - 1
        found.append({**run, "model_ms": ms, "off": off, "meets": abs(off) <= MOST})
    return found
