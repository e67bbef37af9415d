"""Where a watch puts its statistics: a function, a file of JSON lines, TensorBoard."""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from qshard.watching.statistics import OPERANDS, WeightStatistics

Sink = Callable[[int, dict[str, WeightStatistics]], object]


def sink_of(to) -> Sink | None:
    """A function of a step and its statistics. Raises TypeError for what these cannot be put into."""
    if to is None:
        return None
    if isinstance(to, (str, os.PathLike)):
        # Asked now: the process group may have ended when the last statistics arrive.
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_first = not is_distributed or torch.distributed.get_rank() == 0
        return lambda step, statistics: _append(to, statistics) if is_first else None
    # Without the module, which imports tensorboard, no object is of its class.
    module = sys.modules.get("torch.utils.tensorboard")
    if module is not None and isinstance(to, module.SummaryWriter):
        return lambda step, statistics: _add_scalars(to, step, statistics)
    if callable(to):
        return to
    raise TypeError(
        f"qshard.watch: to is a {type(to).__name__}; give the path of a file, a torch.utils.tensorboard.SummaryWriter, "
        "or a function of a step and of a dict from names to qshard.watching.WeightStatistics"
    )


def _append(path, statistics):
    lines = (json.dumps(_finite(asdict(of_weight)), allow_nan=False) for of_weight in statistics.values())
    with open(path, "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def _finite(value):
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _add_scalars(writer, step, statistics):
    for name, of_weight in statistics.items():
        for operand in OPERANDS:
            numbers = getattr(of_weight, operand)
            for key, number in asdict(numbers).items() if numbers is not None else ():
                writer.add_scalar(f"{name}/{operand}/{key}", number, step)
