"""Clients as they are, on two GPUs or more: torchtitan's Trainer and accelerate's FSDP2, plain and quantized.

    python bench/clients.py [CLIENT[:MODEL][:FORMAT][:compiled] …] [--ranks 2] [--steps 20]

CLIENT is torchtitan or accelerate. MODEL is 1B (the sizes of Llama-3.2-1B; the default) or, of torchtitan,
debugmodel (its own). FORMAT is bf16 (the client's own mixed precision; the default), or that of quantized
weights. Tokens are synthetic: each sequence counts up from a random token, by a random step.

A row: median ms of a step after --warmup, between CUDA events; peak memory of steps; losses, means over
the ranks. Ratios are to bf16 of the same client, model and options. Clients are imported only if named
(`pip install torchtitan==0.2.2 accelerate transformers`).
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measuring import Stopwatch, describe, environment, save, table
from training_report import PLAIN, RECIPES

import qshard

DEFAULT = ("torchtitan:debugmodel", "torchtitan:debugmodel:float8_blockwise", "torchtitan",
           "torchtitan:float8_tensorwise", "torchtitan:float8_blockwise", "accelerate",
           "accelerate:float8_tensorwise", "accelerate:float8_blockwise")
ONE_B = dict(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=128256)
TINY = dict(dim=64, layers=2, heads=4, kv_heads=2, hidden=256, vocab=256)


@dataclass(frozen=True)
class Configuration:
    client: str
    model: str = "1B"
    format: str = PLAIN
    compiled: bool = False

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        client, *options = text.split(":")
        fields = {}
        for option in options:
            field = ("format" if option in (PLAIN, *RECIPES) else "model" if option in ("1B", "debugmodel") else
                     "compiled" if option == "compiled" else None)
            if field is None:
                raise argparse.ArgumentTypeError(f"{text}: {option} is neither a format nor a model nor 'compiled'")
            fields[field] = option if field != "compiled" else True
        if client not in CLIENTS or (client, fields.get("model")) == ("accelerate", "debugmodel"):
            raise argparse.ArgumentTypeError(f"{text}: torchtitan[:debugmodel], or accelerate")
        return cls(client, **fields)

    def __str__(self) -> str:
        parts = [self.client, self.model, self.format] + ["compiled"] * self.compiled
        return ":".join(parts)

    @property
    def plain(self) -> "Configuration":
        return dataclasses.replace(self, format=PLAIN)


def sequences(step: int, rank: int, batch: int, length: int, vocab: int) -> torch.Tensor:
    """(batch, length + 1) tokens, of which each follows from the two before."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    first = torch.randint(vocab, (batch, 1), generator=generator)
    by = torch.randint(1, 5, (batch, 1), generator=generator)
    return (first + by * torch.arange(length + 1)) % vocab


@dataclass
class Result:
    step_ms: float
    peak_gb: float
    losses: list[float]


class Recorder:
    """Times and losses of the steps of a run."""

    def __init__(self, args):
        self.warmup, self.watch, self.losses, self.steps = args.warmup, Stopwatch(args.device), [], 0

    def step_done(self, loss: torch.Tensor):
        """`loss`: of this rank."""
        self.losses.append(loss.detach())
        self.steps += 1
        if self.steps == self.warmup and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self.steps >= self.warmup:
            self.watch.mark()

    def result(self) -> Result:
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        losses = (losses / dist.get_world_size()).tolist()
        return Result(median(self.watch.intervals()), peak, losses)


# --------------------------------------------------------------------------------- torchtitan


class Tokens:
    """A data loader of torchtitan's."""

    def __init__(self, dp_rank, job_config, vocab, **_):
        training = job_config.training
        self.make = functools.partial(sequences, rank=dp_rank, batch=training.local_batch_size,
                                      length=training.seq_len, vocab=vocab)

    def __iter__(self):
        step = 0
        while True:
            tokens = self.make(step)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]
            step += 1

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@functools.cache
def titan_trainer():
    """torchtitan's Trainer in the process group that is there, which records its steps."""
    import qshard.integrations.torchtitan  # noqa: F401
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import ParallelDims, Trainer

    stock = llama3.get_train_spec()
    make = functools.partial(llama3.TransformerModelArgs, rope_theta=500000, multiple_of=256)
    models = {
        # torchtitan's FFN width: dim * 8/3 * multiplier, up to a multiple.
        "1B": make(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5,
                   vocab_size=ONE_B["vocab"]),
        "tiny": make(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=TINY["vocab"]),
        "debugmodel": stock.model_args["debugmodel"],
    }
    for name, model in models.items():
        spec = dataclasses.replace(stock, model_args={name: model}, build_tokenizer_fn=None,
                                   build_dataloader_fn=functools.partial(Tokens, vocab=model.vocab_size))
        register_train_spec(f"llama3_{name}", spec)

    class RecordedTrainer(Trainer):
        def __init__(self, config, recorder):
            self.recorder = recorder
            super().__init__(config)

        def init_distributed(self):
            return ParallelDims(dp_shard=-1, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, etp=1,
                                world_size=dist.get_world_size())

        def forward_backward_step(self, **kwargs):
            loss = super().forward_backward_step(**kwargs)
            self.loss = loss.detach()
            return loss

        def train_step(self, data):
            super().train_step(data)
            # Its loss is this rank's part of the mean over all tokens.
            self.recorder.step_done(self.loss * dist.get_world_size())

    return RecordedTrainer


def train_with_torchtitan(configuration: Configuration, args) -> Result:
    trainer_type = titan_trainer()
    from torchtitan.config import ConfigManager

    model = "tiny" if args.tiny and configuration.model == "1B" else configuration.model
    with tempfile.TemporaryDirectory() as folder:
        quantized = ["--model.converters=quantize.qshard",
                     f"--quantize.qshard.recipe={configuration.format}",
                     "--quantize.qshard.filter-fqns=output"]
        config = ConfigManager().parse_args([
            "--job.custom_config_module=qshard.integrations.torchtitan", f"--job.dump_folder={folder}",
            f"--model.name=llama3_{model}", f"--model.flavor={model}", f"--training.steps={args.steps}",
            f"--training.seq_len={args.seq_len}", f"--training.local_batch_size={args.batch}",
            "--activation_checkpoint.mode=none", "--metrics.log_freq=1000", f"--debug.seed={args.seed}",
            f"--lr_scheduler.warmup_steps={args.steps // 2}", f"--optimizer.lr={args.lr}",
            *(quantized if configuration.format != PLAIN else []),
            *(["--compile.enable"] if configuration.compiled else []),
        ])
        recorder = Recorder(args)
        trainer = trainer_type(config, recorder)
        trainer.train()
        trainer.close()
        return recorder.result()


# --------------------------------------------------------------------------------- accelerate


def train_with_accelerate(configuration: Configuration, args) -> Result:
    import accelerate
    import transformers

    sizes = TINY if args.tiny else ONE_B
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=sizes["dim"], num_hidden_layers=sizes["layers"], vocab_size=sizes["vocab"],
            num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
            intermediate_size=sizes["hidden"], max_position_embeddings=args.seq_len, use_cache=False,
            attn_implementation="sdpa"))
    if configuration.format != PLAIN:
        qshard.quantize_(model, RECIPES[configuration.format],
                         filter_fn=lambda _, name: name != "lm_head")
    if configuration.compiled:
        for layer in model.model.layers:
            layer.compile()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    accelerator = accelerate.Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 10, total_iters=args.steps // 2)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder = Recorder(args)
    for step in range(args.steps):
        tokens = sequences(step, dist.get_rank(), args.batch, args.seq_len - 1, sizes["vocab"])
        tokens = tokens.to(args.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recorder.step_done(loss)
    return recorder.result()


CLIENTS = {"torchtitan": train_with_torchtitan, "accelerate": train_with_accelerate}


# -------------------------------------------------------------------------------------- rows


def show(results: dict[Configuration, Result], ranks: int):
    rows = []
    for configuration, result in results.items():
        plain = results.get(configuration.plain)
        ratio = f"{result.step_ms / plain.step_ms:.3f}" if plain else ""
        losses = [f"{result.losses[min(i, len(result.losses)) - 1]:.4f}" for i in (1, 5, 10, 20)]
        rows.append([configuration, f"{result.step_ms:.1f}", ratio, f"{result.peak_gb:.2f}", *losses])
    print(f"\nclients, {ranks} ranks: {describe(environment())}\n")
    header = ("", "step ms", "of bf16", "peak GB", *(f"loss {i}" for i in (1, 5, 10, 20)))
    print(table(header, rows), flush=True)


def run(configuration: Configuration, args):
    """On each rank."""
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo",
                            timeout=timedelta(seconds=120))
    result = CLIENTS[configuration.client](configuration, args)
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(dataclasses.asdict(result)))
    dist.destroy_process_group()


def launch(configuration: Configuration, args) -> Result | None:
    """The ranks of one configuration, in processes of their own: clients keep things for good."""
    options = {"steps", "warmup", "batch", "seq_len", "lr", "seed"}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={args.ranks}", __file__, str(configuration), f"--json={path}",
                   *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options),
                   *(["--tiny"] if args.tiny else [])]
        with log.open("w") as file:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        if not path.exists():
            print(f"FAILED {configuration}\n{log.read_text()[-2000:]}", flush=True)
            return None
        return Result(**json.loads(path.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", type=Configuration.parse, metavar="CONFIGURATION",
                        default=[Configuration.parse(text) for text in DEFAULT])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--batch", type=int, default=4, help="sequences per GPU")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    if args.tiny:
        args.batch, args.seq_len = 2, 64
    if "RANK" in os.environ:  # launch() has started this
        return run(args.configurations[0], args)
    started, results = time.monotonic(), {}
    for configuration in args.configurations:
        if time.monotonic() - started > args.seconds:
            print(f"SKIPPED {configuration}: {args.seconds:.0f} s are over", flush=True)
            continue
        result = launch(configuration, args)
        if result is not None:
            results[configuration] = result
            print(f"{configuration}: {result.step_ms:.1f} ms a step, after "
                  f"{time.monotonic() - started:.0f} s", flush=True)
            save(args.json, {"ranks": args.ranks, "results": {
                str(c): dataclasses.asdict(r) for c, r in results.items()}})
    show(results, args.ranks)


if __name__ == "__main__":
    main()
