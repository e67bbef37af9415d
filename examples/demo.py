"""The demo behind `make demo`: the same training run with plain FSDP2 and with each format.

Each run stops in the middle, saves a checkpoint and resumes from it on another number of processes.
One format trains its first half with tensor parallelism, too, and resumes without.
With --experts the model is train_moe.py's, under expert parallelism: python examples/demo.py --experts
At the end: a table, the losses and their differences to plain FSDP2's as a PNG, and text that the trained
models wrote.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import train_llama
import train_moe
from llama import Llama, LlamaConfig

PLAIN = "bf16"
IN_PARALLEL = "float8_blockwise"
FORMATS = ["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4"]
FORMATS_OF_EXPERTS = ["float8_blockwise", "mxfp8"]  # tokens travel in their codes
HERE = Path(__file__).resolve().parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+",
                        help=f"default: {' '.join(FORMATS)}; with --experts {' '.join(FORMATS_OF_EXPERTS)}")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--processes", type=int, nargs=2, metavar=("BEFORE", "AFTER"),
                        help="number of processes before and after the resume")
    parser.add_argument("--experts", action="store_true", help="train a mixture of experts")
    parser.add_argument("--ep", type=int, default=2, metavar="RANKS", help="with --experts: that share them")
    parser.add_argument("--tp", type=int, default=2, metavar="RANKS",
                        help="of the tensor-parallel run; it is left out where the processes are no "
                             "multiple")
    parser.add_argument("--sample", type=int, default=160, help="bytes of text to generate")
    # Everything else goes to train_llama.py or train_moe.py as it is.
    args, extra = parser.parse_known_args()
    args.formats = args.formats or (FORMATS_OF_EXPERTS if args.experts else FORMATS)
    args.processes = args.processes or default_processes(args.experts)
    if args.experts:
        args.tp = 1
        extra += ["--ep", str(args.ep)]
    return args, extra


def default_processes(has_experts: bool = False) -> tuple[int, int]:
    """2 and then 3 on CPU; all GPUs and then three quarters of them, where there are GPUs. Two ranks share experts,
    which are trained on 2 and then 4, or on all GPUs."""
    gpus = torch.cuda.device_count()
    if has_experts:
        return (gpus, gpus) if gpus else (2, 4)
    return (gpus, max(1, gpus * 3 // 4)) if gpus else (2, 3)


def launch(script: str, processes: int, *arguments):
    """torchrun on this machine, one thread per process: the processes share its cores."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={processes}", HERE / script, *arguments]
    subprocess.run([str(part) for part in command], check=True,
                   env={"OMP_NUM_THREADS": "1", **os.environ})


def global_batch(args) -> int:
    """Sequences of a step: the same before and after the resume, so both numbers of processes divide it."""
    share = math.lcm(*args.processes)
    return math.ceil(12 / share) * share


def seconds_of_a_step(args, extra) -> float:
    """A plain step of this model, timed here, as the processes before the resume would share it."""
    script = train_moe if args.experts else train_llama
    config = script.parse_arguments(["--steps", str(args.steps), *extra])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = config.hidden * (config.top_k if args.experts else 1)  # a token meets top_k experts
    model = Llama(LlamaConfig(dim=config.dim, hidden=hidden, layers=config.layers,
                              heads=config.heads, max_seq_len=config.seq_len)).to(device, torch.bfloat16)
    tokens = torch.zeros(global_batch(args), config.seq_len, dtype=torch.long, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each process has one
    times = []
    for _ in range(3):
        started = time.perf_counter()
        model(tokens).float().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    cores = len(os.sched_getaffinity(0))
    return min(times) / (args.processes[0] if device == "cuda" else min(args.processes[0], cores))


def plan(args, extra, is_parallel: bool) -> str:
    """What the demo is about to do, and about how long it takes."""
    runs = 1 + len(args.formats) + is_parallel
    minutes = runs * args.steps * seconds_of_a_step(args, extra) / 60
    before, after = args.processes
    process = "process" if before == 1 else "processes"
    model = f"small Llama{' with experts' * args.experts}"
    parallel = f", and one format with tensor parallelism over {args.tp} processes" if is_parallel else ""
    return (
        f"This demo trains a {model} {runs} times for {args.steps} steps: with plain FSDP2 ({PLAIN}), then in\n"
        f"{', '.join(args.formats)}{parallel}.\n"
        f"Each run stops in the middle on {before} {process}, saves a checkpoint and resumes on {after}.\n"
        f"A plain step was timed on this machine just now: all steps take about {max(1, math.ceil(minutes))} min "
        "if quantized ones\ntake as long, and more where they take longer, as on a CPU."
    )


def train(names: list[str], args, extra, tp: int = 1) -> list[dict]:
    """First halves, checkpoints, second halves on another number of processes, by FSDP2 alone."""
    checkpoints = args.out / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    before, after = args.processes
    batch = global_batch(args)
    halves = [args.out / f"{half}-half{f'-tp{tp}' if tp > 1 else ''}" for half in ("first", "second")]
    common = ["--format", *names, "--steps", args.steps, "--batch", batch, *extra]
    script = "train_moe.py" if args.experts else "train_llama.py"
    launch(script, before, *common, "--stop-at", args.steps // 2, "--checkpoints", checkpoints,
           "--out", halves[0], "--tp", tp)
    launch(script, after, *common, "--resume", checkpoints, "--sample", args.sample, "--out", halves[1])
    return [joined(*(json.loads((half / f"{name}.json").read_text()) for half in halves))
            for name in names]


def joined(first: dict, second: dict) -> dict:
    tp = first["tp"]
    return {
        **first,  # bytes and speed are those of the first half, the same for every format
        "name": first["format"] + (f", tp {tp}" if tp > 1 else ""),
        "losses": {**first["losses"], **second["losses"]},
        "validation": {**first["validation"], **second["validation"]},
        "resumed_at": second["first_step"],
        "resumed_on": second["world_size"],
        "sample": second["sample"],
    }


def table(runs: list[dict]) -> str:
    """Measurements by format, each with its ratio to plain FSDP2."""
    plain, rows = runs[0], []
    measured = {"weight B/rank": ("weight_bytes", "{:,}"), "gathered B/step": ("gathered_bytes", "{:,}"),
                "dispatched B/step": ("dispatched_bytes", "{:,}"), "steps/s": ("steps_per_second", "{:.2f}")}
    if not plain.get("dispatched_bytes"):
        del measured["dispatched B/step"]
    header = ["", "loss train", "validation", *(cell for name in measured for cell in (name, ""))]
    for run in runs:
        last = list(run["losses"].values())[-10:]
        row = [run["name"], f"{sum(last) / len(last):.3f}", f"{list(run['validation'].values())[-1]:.3f}"]
        for key, form in measured.values():
            # One process gathers nothing.
            ratio = f"{run[key] / plain[key]:.2f}x" if plain[key] else ""
            row += [form.format(run[key]), ratio]
        rows.append(row)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths))
             for row in [header, *rows]]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def plot(runs: list[dict], path: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (axes, differences) = plt.subplots(
        2, sharex=True, figsize=(8, 7.5), height_ratios=(3, 2), layout="constrained"
    )
    plain = runs[0]
    for run in runs:
        steps = [int(step) for step in run["losses"]]
        (line,) = axes.plot(steps, list(run["losses"].values()), linewidth=0.9, label=run["name"])
        axes.plot([int(step) for step in run["validation"]], list(run["validation"].values()), "o",
                  color=line.get_color(), markersize=4)
        for key, style in (("losses", {"linewidth": 0.9}), ("validation", {"marker": "o", "markersize": 4})):
            both = [step for step in run[key] if step in plain[key]]
            differences.plot([int(step) for step in both], [run[key][step] - plain[key][step] for step in both],
                             color=line.get_color(), linestyle="-" if key == "losses" else "", **style)
    for panel in (axes, differences):
        panel.axvline(plain["resumed_at"], color="grey", linestyle="--", linewidth=0.8)
    axes.text(plain["resumed_at"], axes.get_ylim()[1] - 0.1, f" {plain['world_size']} processes → "
              f"{plain['resumed_on']}", va="top", color="grey", fontsize=9)
    axes.set(ylabel="loss, nats per byte (dots: validation)", title="A small Llama on Python's standard library")
    differences.set(xlabel="step", ylabel=f"loss less {plain['name']}'s")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    args, extra = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    is_parallel = args.tp > 1 and args.processes[0] % args.tp == 0
    print(plan(args, extra, is_parallel), flush=True)
    started = time.monotonic()
    runs = train([PLAIN, *args.formats], args, extra)
    if is_parallel:
        runs += train([IN_PARALLEL if IN_PARALLEL in args.formats else args.formats[0]], args, extra, args.tp)
    plot(runs, args.out / "loss.png")

    print(f"\n{table(runs)}\n")
    print(f"{PLAIN}: plain FSDP2, float32 parameters computing in bfloat16. Weight bytes: what a rank "
          "stores between\nsteps, float32 masters included. Gathered bytes: all-gathers of one step, "
          "embedding and head included.\nBoth and the speed on "
          f"{runs[0]['world_size']} processes; resumed on {runs[0]['resumed_on']} at step "
          f"{runs[0]['resumed_at']}. Train loss: mean of the last 10 steps.")
    if args.experts:
        print(f"Experts: {args.ep} processes share those of a layer. Dispatched bytes: tokens to experts and back, "
              "forward and\nbackward, of which results and gradients of tokens are values.")
    if is_parallel:
        print(f"tp {args.tp}: until it resumed, tensor parallelism over {args.tp} processes and FSDP2 over "
              f"{args.processes[0] // args.tp}; its gathered bytes\nare those of activations, and of weights "
              "over FSDP2's ranks alone.")
    if not torch.cuda.is_available():
        print("These processes ran on a CPU, which has no FP8 GEMM: each step dequantizes codes and multiplies\n"
              "values, so steps/s says nothing about a GPU. The bytes and the losses are what to look at.")
    for run in runs:
        print(f"\n--- {run['name']} wrote " + "-" * 60 + f"\n{run['sample']}")
    (args.out / "results.json").write_text(json.dumps(runs, indent=1))
    print(f"\nLosses, and their differences to {PLAIN}'s: {args.out / 'loss.png'}. Took {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
