"""Files that earlier versions of qshard wrote, and what they are once they are loaded.

    python test/golden/fixtures.py FOLDER     # writes such files; those in files/ stay as they are

files/ was written when the digests were first taken, by torch 2.11. A file format that grows gets
new files in a folder of their own.
"""

import os
import pickle
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.overrides import TorchFunctionMode

if path := os.environ.get("QSHARD_LIBRARY"):
    torch.ops.load_library(path)

from canonical import digest
from inputs import largest_of, short
from measure import keeps_master_too, packed, quantized

import qshard

ops = torch.ops.qshard
FILES = Path(__file__).with_name("files")
OLDER_FILES = Path(__file__).parents[1] / "python" / "files"
FORMATS = (
    *(format for format in ops.formats() if format != "float8_delayed"),
    "float8_delayed[history=4]",  # of the default length it would be 12 KB
    "float8_blockwise[stochastic]",
    "nvfp4[stochastic]",
    "mxfp8_1x32[phase]",
)
MODELS = {
    "blockwise": (qshard.Float8BlockScaling(), {}),
    "delayed": (qshard.DelayedScaling(amax_history_len=4), {}),
    "nvfp4, stochastic": (
        qshard.NVFP4BlockScaling(),
        {"keep_master": False, "stochastic_rounding": True},
    ),
}


# ----------------------------------------------------------------------------------------- written


def tensors():
    made = {}
    for format in FORMATS:
        for keep_master in keeps_master_too(format):
            made[f"{format}{', master' * keep_master}"] = quantized(
                format, "cpu", (5, 20), keep_master=keep_master
            )
    return made


def small_model(name, factor=1.0):
    recipe, options = MODELS[name]
    made = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), qshard.nn.LayerNormLinear(16, 8)
    )
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            first = short(*parameter.shape, seed=seed, largest=largest_of(recipe.format))
            parameter.copy_(factor * first)
    torch.manual_seed(11)
    return qshard.quantize_(made, recipe, **options)


def adamw(model):
    return torch.optim.AdamW(
        model.parameters(), lr=2**-6, betas=(0.5, 0.75), eps=2**-10, weight_decay=0.0
    )


class RoundedSquareRoots(TorchFunctionMode):
    """Square roots are correctly rounded. torch takes those of a CPU from MKL, which on some (AMD EPYC, say) rounds to the
    other neighbour now and then; the digests are of the nearest."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.sqrt and args[0].device.type == "cpu":
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        return function(*args, **(kwargs or {}))


def step(model, optimizer, seed):
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = short(*parameter.shape, seed=seed + i).to(parameter.device)
    with RoundedSquareRoots():
        optimizer.step()
    optimizer.zero_grad()


def write(folder):
    folder.mkdir(parents=True)
    torch.save(tensors(), folder / "tensors.pt")
    (folder / "tensors.pkl").write_bytes(pickle.dumps(tensors(), 4))
    models = {name: small_model(name) for name in MODELS}
    torch.save(models, folder / "modules.pt")
    optimizers = {name: adamw(model) for name, model in models.items()}
    for name, model in models.items():
        step(model, optimizers[name], 50)
    torch.save({name: o.state_dict() for name, o in optimizers.items()}, folder / "optimizers.pt")
    state = {name: model.state_dict() for name, model in models.items()}
    torch.save(state, folder / "state_dicts.pt")
    dcp.save(state, checkpoint_id=folder / "checkpoint", no_dist=True)


# ------------------------------------------------------------------------------------------ loaded


def all_of(tensor):
    if not ops.is_quantized(tensor):
        return tensor.detach()
    return [type(tensor).__name__, tensor.requires_grad, tensor.dtype, packed(tensor)]


def all_of_model(model):
    """After what is written was flushed, as a forward would."""
    qshard.flush(model)
    return {name: all_of(parameter) for name, parameter in model.named_parameters()}


def files(device):
    for name in ("tensors.pt", "tensors.pkl"):
        for tensor, q in load(name).items():
            yield f"{name}, {tensor}", {"all": digest(all_of(q.to(device)))}
    for name, model in load("modules.pt", weights_only=False).items():
        model = model.to(device)
        yield f"modules.pt, {name}", {
            "parameters": digest({n: all_of(p) for n, p in model.named_parameters()}),
            "buffers": digest(dict(model.named_buffers())),
            "modules": digest([type(module).__name__ for module in model.modules()]),
        }
    optimizers, state_dicts = load("optimizers.pt"), load("state_dicts.pt")
    plain = {
        name: {key: torch.zeros_like(value) for key, value in state.items()}
        for name, state in state_dicts.items()
    }
    dcp.load(plain, checkpoint_id=FILES / "checkpoint", no_dist=True)
    for name in MODELS:
        model = small_model(name, 0.5).to(device)
        own = model.state_dict()
        dcp.load({name: own}, checkpoint_id=FILES / "checkpoint", no_dist=True)
        parts = {
            "as plain tensors": digest(plain[name]),
            "into a model": digest(all_of_model(model)),
        }
        model = small_model(name, 0.5).to(device)
        model.load_state_dict(state_dicts[name])
        parts["state_dict"] = digest(all_of_model(model))
        optimizer = adamw(model)
        optimizer.load_state_dict(optimizers[name])
        step(model, optimizer, 90)
        parts["a step later"] = digest(all_of_model(model))
        yield f"checkpoint, {name}", parts


def load(name, weights_only=True):
    if name.endswith(".pkl"):
        return pickle.loads((FILES / name).read_bytes())
    return torch.load(FILES / name, weights_only=weights_only)


def older_files(device):
    """Files from before pickles named qshard.serialization."""
    file = torch.load(OLDER_FILES / "before_serialization.pt", weights_only=True)
    for name, q in file["tensors"].items():
        yield f"before_serialization.pt, {name}", {"all": digest(all_of(q))}
    q, _ = pickle.loads((OLDER_FILES / "before_serialization.pkl").read_bytes())
    yield "before_serialization.pkl", {"all": digest(all_of(q))}


SECTIONS = {"files": files, "older files": older_files}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
