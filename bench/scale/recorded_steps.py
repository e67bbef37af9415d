"""The model beside the recorded steps: python bench/scale/recorded_steps.py

Links over TCP have the rate that the run's plain bf16 step says: its bytes over its whole time, which is a lower bound.
The profiles that rates come from are those of 2026-11-25-h200.md and 2026-11-24-h100.md; the other runs are other days,
machines, numbers of GPUs, meshes and links.
"""

from pathlib import Path

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


def rows() -> list[dict]:
    found = []
    for run in RECORD["runs"]:
        ms = job_of(run).step().seconds * 1e3
        off = ms / run["ms"] - 1
        found.append({**run, "model_ms": ms, "off": off, "meets": abs(off) <= MOST})
    return found


def table(found: list[dict]) -> str:
    lines = [
        "| GPUs | over | replicas x shards x TP | configuration | gradients | recorded, ms | model, ms | off | source |"
    ]
    lines.append("|---" * 9 + "|")
    for run in found:
        mesh = " x ".join(map(str, run["mesh"]))
        lines.append(
            f"| {run['gpus']} | {run['over']} | {mesh} | `{run['configuration']}` | {run['gradients']} | {run['ms']:,.1f} "
            f"| {run['model_ms']:,.1f} | {run['off']:+.1%} | `{Path(run['source']).name}` |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    found = rows()
    print(table(found))
    print(f"\n{sum(run['meets'] for run in found)} of {len(found)} within {MOST:.0%}")
