"""What a training step really costs in bytes: collectives on the wire, weights in memory."""

import json
import math
import os
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

# Read when the profiler starts: without a GPU it would report that it found none.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

ITEM_SIZE = {"unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "int": 4, "long int": 8}


@contextmanager
def collective_bytes(by_dtype: bool = False):
    """Yields a Counter that holds, on exit, this rank's bytes by collective of the process groups, or by
    (collective, dtype in the profiler's words).

    An all-gather counts by its output, anything else by what the rank puts in. The profiler sees
    each c10d operator wherever it is issued: FSDP2's hooks, autograd's threads, C++ code.
    """
    counted = Counter()
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        yield counted
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    named = [(*event["name"].partition("::")[::2], event) for event in events
             if "Input Dims" in event.get("args", {})]
    callers = [event for namespace, _, event in named if namespace == "_c10d_functional"]
    for namespace, name, event in named:
        if namespace == "c10d":
            around = [caller for caller in callers if caller["tid"] == event["tid"]
                      and 0 <= event["ts"] - caller["ts"] <= caller["dur"]]
            kind, nbytes = operator_bytes(name, event["args"], around)
            counted[(name.strip("_"), kind) if by_dtype else name.strip("_")] += nbytes


def operator_bytes(name: str, event: dict, around: list[dict]) -> tuple[str, int]:
    """Dtype and bytes of one c10d operator, from the argument shapes and types that the profiler noted. `around`:
    DTensor's operators that called it."""
    index = 1 if "reduce_scatter" in name else 0  # (output, input, …); in place: (tensors, …)
    shape, kind = event["Input Dims"][index], event["Input type"][index]
    if kind == "TensorList":  # noted without dtypes; the in-place reductions here are of 4-byte types
        size = ITEM_SIZE[around[0]["args"]["Input type"][0]] if around else 4
        return kind, sum(math.prod(s) * size for s in shape)
    return kind, math.prod(shape) * ITEM_SIZE[kind]


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of storage that this rank's shards of the parameters keep alive between steps."""
    storages = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for tensor in planes(local):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def planes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that make up a tensor: itself, or codes, scales and master."""
    qshard = torch.ops.qshard if hasattr(torch.ops.qshard, "is_quantized") else None
    if qshard is None or not qshard.is_quantized(tensor):
        return [tensor.detach()]
    found = [qshard.codes(tensor), qshard.scale_inv(tensor), qshard.master(tensor)]
    return [plane.detach() for plane in found if plane is not None]
