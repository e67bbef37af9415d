"""The table of docs/optimizers.md: its rows, and the bytes that each must show."""

import importlib
import re
from pathlib import Path

import torch
from helpers import ops
from models.optimizer_twins import inner_tensors, tensors_in
from torch import nn

from qshard._runtime.classes import TensorState

PAGE = Path(__file__).parents[4] / "docs" / "optimizers.md"
SIZE = 512, 512
MUON = dict(use_muon=True)
# By the name in the page, without its quotes: package, class, arguments and dtype of the parameters.
ROWS = {
    "AdamW, Adam, NAdam, RAdam, Adamax": ("torch.optim", "AdamW", {}, torch.float32),
    "AdamW, parameters in bf16": ("torch.optim", "AdamW", {"fused": True}, torch.bfloat16),
    "SGD with momentum": ("torch.optim", "SGD", {"momentum": 0.9}, torch.float32),
    "Adagrad": ("torch.optim", "Adagrad", {}, torch.float32),
    "RMSprop": ("torch.optim", "RMSprop", {}, torch.float32),
    "Adadelta": ("torch.optim", "Adadelta", {}, torch.float32),
    "Rprop": ("torch.optim", "Rprop", {}, torch.float32),
    "ASGD": ("torch.optim", "ASGD", {}, torch.float32),
    "Adafactor": ("torch.optim", "Adafactor", {}, torch.float32),
    "Muon": ("torch.optim", "Muon", {}, torch.float32),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}, torch.float32),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", {}, torch.float32),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}, torch.float32),
    "schedulefree AdamWScheduleFree, RAdamScheduleFree": (
        "schedulefree", "AdamWScheduleFree", {}, torch.float32,
    ),
    "schedulefree SGDScheduleFree": ("schedulefree", "SGDScheduleFree", {}, torch.float32),
    "pytorch_optimizer Muon, AdaMuon, NorMuon": ("pytorch_optimizer", "Muon", MUON, torch.float32),
    "pytorch_optimizer Lion": ("pytorch_optimizer", "Lion", {}, torch.float32),
    "pytorch_optimizer SOAP, of a square matrix": ("pytorch_optimizer", "SOAP", {}, torch.float32),
    "pytorch_optimizer Shampoo, of a square matrix": ("pytorch_optimizer", "Shampoo", {}, torch.float32),
}
# Format and whether it has a master, in the order of the table's columns.
WEIGHTS = [("float8_blockwise", True), ("nvfp4", True), ("float8_blockwise", False), ("nvfp4", False)]


def rows_of_torch():
    return [name for name, (package, *_) in ROWS.items() if package == "torch.optim"]


def rows_of_packages():
    return [name for name in ROWS if name not in rows_of_torch()]


def shown():
    """By name, the cells of the table that follow it."""
    page = PAGE.read_text().partition("## Bytes per parameter")[2]
    rows = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", page, re.MULTILINE)]
    return {name.replace("`", ""): cells for name, *cells in rows}


def quantized(fmt, keep_master, dtype):
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    return nn.Parameter(ops.quantize(values, fmt, keep_master=keep_master))


def weight_bytes(param):
    """Codes, scales and master, for each element."""
    planes = TensorState(param.detach()).storage_bytes()
    return (planes["image"] + planes["grid"] + planes["master"]) / param.numel()


def state_bytes(param, package, kind, arguments):
    """Bytes of the states after one step, for each element. Scalars count."""
    param.grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).to(param.dtype)
    groups = [dict(params=[param], **arguments)] if "use_muon" in arguments else [param]
    further = {} if groups[0] is not param else arguments
    optimizer = getattr(importlib.import_module(package), kind)(groups, lr=1e-2, **further)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    tensors = [part for _, tensor in tensors_in(optimizer.state[param]) for part in inner_tensors(tensor)]
    return sum(tensor.nbytes for tensor in tensors) / param.numel()


def expected(name):
    package, kind, arguments, dtype = ROWS[name]
    params = [quantized(fmt, keep_master, dtype) for fmt, keep_master in WEIGHTS]
    weights = [weight_bytes(param) for param in params]
    states = state_bytes(params[0], package, kind, arguments)
    return [f"{number:.2f}" for number in (states + dtype.itemsize, states, *(states + w for w in weights))]


def check_row(name):
    cells = shown()[name]
    assert cells == expected(name), (cells, expected(name))
