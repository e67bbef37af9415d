"""What docs/scale.md shows of the model: its tables, and the lines of its plot."""

from dataclasses import replace
from pathlib import Path

import recorded_steps
from model_shapes import LLAMA_70B, MOE, SHAPES, Shape
from step_model import NODE, PLAIN, Gpu, Job

GPU = Gpu("H100")
GPUS = (8, 64, 512, 4096)
LINKS = (25, 50, 100, 200, 400, 900)  # GB/s that a GPU sends
BLOCKS, TENSOR = "float8_blockwise:fused", "float8_tensorwise:fused"
FORMATS = ("float8_tensorwise", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4")
EXPERT_RANKS = 64
HIDDEN = 0.01  # collectives that lengthen a step by less than this part of it count as hidden
# What travels, and what multiplies: a label, a configuration, and further arguments of a Job.
VARIANTS = (
    ("bf16", PLAIN, {}),
    ("FP8 GEMMs, bf16 gathered", BLOCKS, {"gathers_codes": False}),
    ("FP8 GEMMs, codes gathered", BLOCKS, {}),
    ("the same, FP8 gradients", BLOCKS, {"gradients": "float8"}),
)
GB = 1e9


def meshes(shape: Shape, gpus: int) -> dict[str, dict]:
    """By name, the mesh's part of a Job. GPUs of a tensor-parallel group, and HSDP's shards, are those of a node."""
    expert = {"expert": min(EXPERT_RANKS, gpus)} if shape.experts else {}
    found = {"FSDP" + (f", EP {expert['expert']}" if expert else ""): {"shards": gpus, **expert}}
    if not shape.experts:  # experts that a node alone holds leave no room
        if gpus > NODE:
            found["HSDP, 8 shards"] = {"shards": NODE, "replicas": gpus // NODE}
        found["FSDP, TP 8"] = {"shards": gpus // NODE, "tensor": NODE}
    return found


def first_mesh(shape: Shape, gpus: int) -> tuple[str, dict]:
    """FSDP over all GPUs, with expert parallelism where there are experts: (name, part of a Job)."""
    return next(iter(meshes(shape, gpus).items()))


def job(shape: Shape, configuration: str, link: float, mesh: dict, **options) -> Job:
    return Job(shape, configuration, link=link * GB, gpu=GPU, **mesh, **options)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def gigabytes(size: float) -> str:
    return f"{size / GB:,.2f}" if size < GB else f"{size / GB:,.1f}" if size < 100 * GB else f"{size / GB:,.0f}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f}" if size < 1e7 else f"{size / 1e6:,.0f}"


def gathers() -> tuple[list[str], list[list[str]]]:
    """By link: FP8's step with gathers of codes, of the step with gathers of bf16."""
    heads = ["model, 512 GPUs", "configuration", *(f"{link} GB/s" for link in LINKS)]
    found = []
    for shape in SHAPES:
        name, mesh = first_mesh(shape, 512)
        for configuration in (TENSOR, BLOCKS, "mxfp8", "nvfp4"):
            if shape.experts and configuration != BLOCKS:
                continue  # no other experts' GEMMs are recorded by their sizes
            cells = []
            for link in LINKS:
                codes = job(shape, configuration, link, mesh)
                values = replace(codes, gathers_codes=False)
                cells.append(f"{codes.step().seconds / values.step().seconds:.2f}")
            found.append([f"{shape.name}, {name}", f"`{configuration}`", *cells])
    return heads, found


def hidden_from(shape: Shape, configuration: str, mesh: dict, options: dict) -> str:
    """The slowest link, in GB/s, on which the collectives of layers take no more than HIDDEN."""
    low, high = 1.0, 10_000.0

    def hides(link):
        one = job(shape, configuration, link, mesh, **options)
        return one.step().seconds <= (1 + HIDDEN) * one.step(has_collectives_of_layers=False).seconds

    if not hides(high):
        return "never"
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if hides(middle) else (middle, high)
    return f"{high:,.0f}"


def hides() -> tuple[list[str], list[list[str]]]:
    heads = ["model, 512 GPUs", *(label for label, *_ in VARIANTS)]
    found = []
    for shape in SHAPES:
        for name, mesh in meshes(shape, 512).items():
            if "HSDP" in name:
                continue
            cells = [hidden_from(shape, configuration, mesh, options) for _, configuration, options in VARIANTS]
            found.append([f"{shape.name}, {name}", *cells])
    return heads, found


def steps() -> tuple[list[str], list[list[str]]]:
    heads = [
        "model",
        "mesh",
        "GPUs",
        "bf16, ms",
        "exposed",
        "FP8, ms",
        "exposed",
        "of bf16",
        "state, GB: bf16; FP8",
        "unsharded, GB: bf16; FP8",
    ]
    found = []
    for shape in SHAPES:
        for gpus in GPUS:
            for name, mesh in meshes(shape, gpus).items():
                plain, ours = job(shape, PLAIN, 50, mesh), job(shape, BLOCKS, 50, mesh)
                a, b = plain.step(), ours.step()
                found.append([
                    shape.name, name, f"{gpus:,}", ms(a.seconds), ms(a.exposed), ms(b.seconds), ms(b.exposed),
                    f"{b.seconds / a.seconds:.2f}", f"{gigabytes(plain.state_bytes)}; {gigabytes(ours.state_bytes)}",
                    f"{gigabytes(plain.unsharded_bytes)}; {gigabytes(ours.unsharded_bytes)}",
                ])  # fmt: skip
    return heads, found


def flushes() -> tuple[list[str], list[list[str]]]:
    heads = ["model, FSDP", "GPUs", *(f"`{format}`" for format in FORMATS)]
    found = []
    for shape in SHAPES:
        for gpus in GPUS[1:]:
            _, mesh = first_mesh(shape, gpus)
            jobs = [job(shape, format, 50, mesh) for format in FORMATS]
            found.append(
                [
                    shape.name,
                    f"{gpus:,}",
                    *(f"{megabytes(j.flush_bytes)}; {j.flush_seconds * 1e3:,.1f}" for j in jobs),
                ]
            )
    return heads, found


def latencies() -> tuple[list[str], list[list[str]]]:
    heads = ["µs of a collective", "0", "50", "200", "1,000"]
    found = []
    for link in (50, 400):
        for configuration in (PLAIN, BLOCKS):
            made = [
                job(LLAMA_70B, configuration, link, {"shards": 512}, latency=us * 1e-6) for us in (0, 50, 200, 1000)
            ]
            found.append([f"`{configuration}`, {link} GB/s: step, ms", *(ms(one.step().seconds) for one in made)])
    return heads, found


def checks() -> tuple[list[str], list[list[str]]]:
    heads = [
        "GPUs, link",
        "replicas x shards x TP",
        "configuration",
        "gradients",
        "recorded, ms",
        "model, ms",
        "off",
        "source",
    ]
    found = []
    for run in recorded_steps.rows():
        off = f"{run['off']:+.1%}"
        link = "" if run["gpus"].startswith("one") else f", {run['over']}"
        found.append(
            [
                run["gpus"] + link,
                " x ".join(map(str, run["mesh"])),
                f"`{run['configuration']}`",
                run["gradients"],
                f"{run['ms']:,.1f}",
                f"{run['model_ms']:,.1f}",
                off if run["meets"] else f"**{off}**",
                f"`{Path(run['source']).name}`",
            ]
        )
    return heads, found


def misses() -> tuple[list[str], list[list[str]]]:
    found = {}
    for run in recorded_steps.rows():
        if not run["meets"]:
            found.setdefault(run["reason"], []).append(f"{run['gpus']}, {run['over']}: {run['ms']:,.1f}")
    return ["rows, by their recorded ms", "why"], [["; ".join(rows), reason] for reason, rows in found.items()]


def host() -> tuple[list[str], list[list[str]]]:
    heads = ["model, 512 GPUs at 400 GB/s", "bf16: host, ms", "bf16: step, ms", "FP8: host, ms", "FP8: step, ms"]
    found = []
    for shape in SHAPES:
        name, mesh = first_mesh(shape, 512)
        cells = []
        for configuration in (PLAIN, BLOCKS):
            one = job(shape, configuration, 400, mesh)
            cells += [f"{one.host_ms():,.1f}", ms(one.step().seconds)]
        found.append([f"{shape.name}, {name}", *cells])
    return heads, found


TABLES = {
    "hides": hides, "gathers": gathers, "steps": steps, "flushes": flushes, "latencies": latencies, "host": host,
    "checks": checks, "misses": misses,
}  # fmt: skip


def plot() -> dict:
    """Lines of step time by link."""
    links = [25, 35, 50, 70, 100, 140, 200, 280, 400, 560, 900]
    panels = []
    for shape in (LLAMA_70B, MOE):
        name, mesh = first_mesh(shape, 512)
        lines = []
        for label, configuration, options in VARIANTS:
            steps = [job(shape, configuration, link, mesh, **options).step() for link in links]
            lines.append({"label": label, "ms": [round(step.seconds * 1e3, 1) for step in steps]})
        panels.append({"title": f"{shape.name}, {name}", "lines": lines})
    return {"links": links, "panels": panels}


def output() -> dict:
    """All of it, as docs/figures/scale.json has it."""
    made = {name: function() for name, function in TABLES.items()}
    return {
        "tables": {name: {"heads": heads, "rows": rows} for name, (heads, rows) in made.items()},
        "plot": plot(),
    }
