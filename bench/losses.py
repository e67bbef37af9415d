"""Held-out losses of examples/train_llama.py's model, trained to the end in several ways.

    torchrun --nproc-per-node 1 bench/losses.py float8_blockwise 'float8_blockwise[x_block_scaling_dim=1]'
    torchrun --nproc-per-node 2 bench/losses.py bf16 bf16:reduced_float8 bf16:reduced_nvfp4:stochastic
    torchrun --nproc-per-node 1 bench/losses.py --token-bytes 2 float8_tensorwise \\
        float8_tensorwise:head_float8_tensorwise:head_bf16_forward float8_tensorwise:head_float8_tensorwise

A CONFIGURATION is bf16 or a format, with options after colons:
    reduced_FORMAT   gradients reduced in float8, mxfp8 or nvfp4 (qshard.reduce_gradients_)
    stochastic       those rounded stochastically
    head_FORMAT      the head is multiplied in this format, in one step with the loss (linear_cross_entropy);
                     without it the head is bf16
    head_bf16_forward  forward of that head stays bf16

All from the same seeds, a seed after the other; how far each one's mean is from that of the first named,
beside the standard deviation of its seeds. A loss is the mean of the last three validations, on the same
text.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import describe, environment, out_of_time, save, table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_llama  # noqa: E402


def arguments_of(configuration: str) -> list[str]:
    """train_llama.py's."""
    format, *options = configuration.split(":")
    arguments = ["--format", format]
    for option in options:
        if option == "stochastic":
            arguments += ["--gradient-rounding", option]
        elif option == "head_bf16_forward":
            arguments += ["--head-forward", "bf16"]
        elif option.startswith("head_"):
            arguments += ["--head-format", option.removeprefix("head_")]
        elif option.startswith("reduced_"):
            arguments += ["--gradients", option.removeprefix("reduced_")]
        else:
            raise SystemExit(f"{configuration}: unknown {option}")
    return arguments


def held_out_loss(configuration: str, seed: int, args, mesh) -> float:
    arguments = [*arguments_of(configuration), "--steps", args.steps, "--seed", seed, "--batch", args.batch,
                 "--validate-every", max(args.steps // 20, 1), "--token-bytes", args.token_bytes]
    if args.tiny:
        arguments += ["--dim", 32, "--hidden", 48, "--layers", 1, "--heads", 4]
    llama = train_llama.parse_arguments(list(map(str, arguments)))
    result = train_llama.train(train_llama.Trainer(*llama.formats, llama, mesh), 0, llama.steps)
    last = list(result["validation"].values())[-3:]
    return sum(last) / len(last)


def loss_table(losses: dict[str, list[float]], seeds: int) -> str:
    (first, reference), *_ = losses.items()
    reference = torch.tensor(reference)
    rows = []
    for configuration, of_seeds in losses.items():
        missing = [""] * (seeds - len(of_seeds))
        far = torch.tensor(of_seeds) - reference[: len(of_seeds)]
        rows.append([configuration, *(f"{loss:.4f}" for loss in of_seeds), *missing,
                     f"{far.mean():+.4f}", f"{far.std():.4f}" if len(far) > 1 else ""])
    noise = f"{reference.std():.4f}" if len(reference) > 1 else "unknown of one seed"
    header = ["", *(f"seed {seed + 1}" for seed in range(seeds)), "mean off", "its deviation"]
    return f"standard deviation of {first}'s seeds: {noise}\n\n" + table(header, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="+", metavar="CONFIGURATION")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, all ranks together")
    parser.add_argument("--token-bytes", type=int, choices=[1, 2], default=1,
                        help="of one token: 256 words, or 65,536")
    parser.add_argument("--seconds", type=float, default=400, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="a smaller model, to try the script")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(), 1),
                                             mesh_dim_names=("dp", "tp"))
    losses, started = {}, time.monotonic()
    for seed in range(1, args.seeds + 1):
        for configuration in args.configurations:
            if not out_of_time(started, args.seconds, device) or not losses:
                loss = held_out_loss(configuration, seed, args, mesh)
                losses.setdefault(configuration, []).append(loss)
    if dist.get_rank() == 0:
        print(f"\nheld-out losses, {args.steps} steps, {dist.get_world_size()} ranks: "
              f"{describe(environment())}\n{loss_table(losses, args.seeds)}", flush=True)
        save(args.json, {"losses": losses})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
