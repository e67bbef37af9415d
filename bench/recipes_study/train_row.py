"""Trains one row with one seed, on a GPU by a CUDA graph of the whole step."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from recipe_rows import Row, is_plain

import qshard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from data import StandardLibrary  # noqa: E402
from llama import Llama, LlamaConfig  # noqa: E402


@dataclass(frozen=True)
class Sizes:
    """What a model has, a step, and the held-out text."""

    layers: int = 7
    dim: int = 256
    hidden: int = 704
    heads: int = 4
    length: int = 256
    batch: int = 16
    steps: int = 1000
    lr: float = 2e-3
    validate_every: int = 50
    validation: int = 128  # sequences, at every evaluation but the last
    last_validation: int = 1024


TINY = Sizes(layers=4, dim=64, hidden=96, length=32, batch=2, steps=6, validate_every=3, validation=4,
             last_validation=8)


class Run:
    """A model in training. The seed decides the first weights and which text comes when; held out is the same
    text for all."""

    def __init__(self, row: Row, seed: int, sizes: Sizes, device: str):
        self.row, self.sizes, self.device = row, sizes, device
        self.is_cuda = device.startswith("cuda")
        torch.manual_seed(seed)
        config = LlamaConfig(dim=sizes.dim, hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads,
                             max_seq_len=sizes.length)
        self.model = Llama(config).to(device)
        if row.recipe is not None:
            qshard.quantize_(self.model, row.recipe,
                             filter_fn=lambda _, name: not is_plain(row, name, sizes.layers))
        lr = torch.tensor(0.0, device=device) if self.is_cuda else sizes.lr
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=True, capturable=self.is_cuda)
        text = StandardLibrary(sizes.length, seed)
        self.train, self.held_out = text.train.to(device), text.validation.to(device)
        draws = torch.Generator().manual_seed(1_000_003 * seed)
        last = len(text.train) - sizes.length - 1
        self.starts = torch.randint(last, (sizes.steps, sizes.batch), generator=draws).to(device)
        self.tokens = torch.empty(sizes.batch, sizes.length + 1, dtype=torch.long, device=device)
        self.graph = None

    def loss(self, tokens):
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def at(self, text, starts):
        """The bytes of `text` from each start on, (starts, length + 1)."""
        return text[starts[:, None] + torch.arange(self.sizes.length + 1, device=self.device)].long()

    def take(self, step: int):
        """Puts batch and learning rate of a step where the graph reads them."""
        self.tokens.copy_(self.at(self.train, self.starts[step]))
        warm = min(1.0, (step + 1) / 50)
        lr = self.sizes.lr * warm * (1 - 0.9 * step / self.sizes.steps)
        for group in self.optimizer.param_groups:
            if self.is_cuda:
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def update(self):
        self.optimizer.zero_grad()
        loss = self.loss(self.tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def capture(self):
        """The graph of a step. Nothing runs; the weights stay."""
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.update()
        self.graph = graph

    @torch.no_grad()
    def validate(self, sequences: int) -> float:
        draws = torch.Generator().manual_seed(0)
        starts = torch.randint(len(self.held_out) - self.sizes.length - 1, (sequences,), generator=draws)
        parts = starts.to(self.device).split(64)
        losses = [self.loss(self.at(self.held_out, part)) * len(part) for part in parts]
        return (sum(losses) / sequences).item()

    def is_switch(self, step: int) -> bool:
        return self.row.last_steps > 0 and step == round((1 - self.row.last_steps) * self.sizes.steps)

    def train_to_the_end(self, graphs: bool) -> dict:
        sizes, losses, started, eager = self.sizes, {}, time.monotonic(), 3
        stream = torch.cuda.Stream() if self.is_cuda else None  # graphs are captured after steps on another one
        for step in range(sizes.steps):
            if self.is_switch(step):
                self.graph, eager = None, step + 3
                self.optimizer.zero_grad()
                if self.row.plain_backward:
                    qshard.dequantize_(self.model)
                else:
                    qshard.set_forward_precision(self.model, "bf16")
            self.take(step)
            if self.graph is not None:
                self.graph.replay()
            elif stream is None:
                self.update()
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self.update()
                torch.cuda.current_stream().wait_stream(stream)
                if graphs and step + 1 >= eager:
                    self.capture()
            if (step + 1) % sizes.validate_every == 0 and step + 1 < sizes.steps:
                losses[step + 1] = self.validate(sizes.validation)
        losses[sizes.steps] = self.validate(sizes.last_validation)
        return {"losses": losses, "loss": losses[sizes.steps], "seconds": time.monotonic() - started,
                "graph": self.graph is not None}


def train(row: Row, seed: int, sizes: Sizes, device: str, graphs: bool) -> dict:
    """The held-out losses. Where a step cannot be captured, the run starts again without a graph."""
    if device == "cuda" and graphs:
        try:
            return Run(row, seed, sizes, device).train_to_the_end(graphs=True)
        except RuntimeError as error:
            print(f"no CUDA graph of {row.title}: {str(error).splitlines()[0]}", flush=True)
    return Run(row, seed, sizes, device).train_to_the_end(graphs=False)
