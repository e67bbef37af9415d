"""What of a model goes into a checkpoint, and under which names."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from qshard._runtime.checkpoint import state_names
from qshard._runtime.hooks import local_of
from qshard.checkpoint.experts import Part, parts_of
from qshard.model.choosing import weight_names
from qshard.model.quantize import is_quantized
from qshard.model.state_buffers import without_wrappers


ops = torch.ops.qshard


@dataclass(frozen=True)
class Entry:
    key: str  # in the model's state_dict
    name: str  # in files
    tensor: torch.Tensor
    part: Part | None = None  # of a stack of experts
    box: list | None = None  # of a part, once boxes_of has found them: the rank's boxes of the stack, held and logical

    # What is cached stays as it is while the entry is used: a checkpoint or a stream makes its own.
    @cached_property
    def is_quantized(self):
        return is_quantized(self.tensor)

    @property
    def is_parameter(self):
        return isinstance(self.tensor, nn.Parameter)

    @cached_property
    def module(self):
        """In files, of a parameter `module.weight`."""
        return self.name.removesuffix(".weight")

    @cached_property
    def shape(self):
        return tuple(self.tensor.shape) if self.part is None else (self.part.rows, self.part.columns)

    @cached_property
    def format(self):
        return ops.format(local_of(self.tensor))

    @property
    def matrix(self):
        """This rank's part of the matrix that has the tensor scale."""
        local = local_of(self.tensor)
        return local if self.part is None else self.part.matrix(local, self.box[0])

    @property
    def local(self):
        """This rank's part, where it is not transposed. Without rows, it may have a dimension more."""
        return self.matrix if self.part is None else self.part.rows_of(self.matrix, self.box[0])

    @property
    def value(self):
        """This rank's part, plain: of the master if there is one."""
        kept = ops.master(self.matrix)
        value = kept if kept is not None else ops.dequantize(self.matrix, dtype=torch.float32)
        if self.part is None:
            return value
        return self.part.rows_of(value.mT if self.part.is_transposed else value, self.box[0])


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel, DataParallel and torch.compile were given."""
    while (name := _name_of_wrapped(model)) is not None:
        model = getattr(model, name)
    return model


def _name_of_wrapped(module: nn.Module) -> str | None:
    """The part that a wrapper adds to names, by the wrapper's class; of other modules None."""
    if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
        return "module"
    # It is there if anything was compiled. (Its import takes seconds.)
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return "_orig_mod" if isinstance(module, compiled) else None


def own_class(model: nn.Module) -> type:
    """The class that a model had before fully_shard, which makes a subclass of it and FSDPModule."""
    return next(
        cls
        for cls in type(model).__mro__
        if FSDPModule not in cls.__bases__ and cls is not FSDPModule
    )


def entries_of(model: nn.Module, names) -> list[Entry]:
    """Parameters and persistent buffers, sharded, each once: what qshard itself keeps is not among
    them. Raises ValueError and NotImplementedError by name."""
    state_dict = model.state_dict(keep_vars=True)
    own = state_names(state_dict)
    rename = _renaming(names, model)
    entries, seen, keys = [], {}, {}
    for key, tensor in state_dict.items():
        if key in own or not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) in seen:
            if is_quantized(tensor):
                raise NotImplementedError(
                    f"{key} and {seen[id(tensor)]} are one quantized tensor, which readers look up "
                    "plain as an embedding; leave it plain by quantize_'s filter_fn"
                )
            continue
        seen[id(tensor)] = key
        for entry in _of_key(model, key, tensor, rename):
            if entry.name in keys:
                raise ValueError(f"names gives {entry.name!r} for {entry.key} and for {keys[entry.name]}")
            keys[entry.name] = entry.key
            if entry.is_quantized and (len(entry.shape) != 2 or not entry.name.endswith(".weight")):
                raise NotImplementedError(
                    f"{entry.key}, {entry.name!r} in files, is a quantized tensor of shape {entry.shape}; "
                    "layouts hold matrices named <module>.weight"
                )
            entries.append(entry)
    return entries


def _of_key(model, key, tensor, rename):
    if not is_quantized(tensor) or tensor.dim() != 3:
        return [Entry(key, rename(key), tensor)]
    prefix, _, attribute = key.rpartition(".")
    box = []
    return [
        Entry(f"{key}[{part.expert}].{part.projection}", rename(part.name), tensor, part, box)
        for part in parts_of(model.get_submodule(prefix), attribute, key, tensor)
    ]


def plain_linears(model: nn.Module, names) -> list[str]:
    """Names in files of linear modules that are left plain, tied ones too, whose weight the files hold by
    another name."""
    rename, keys = _renaming(names, model), model.state_dict(keep_vars=True).keys()
    found = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in weight_names(module) if isinstance(module, nn.Linear) else ():
            weight = getattr(module, name, None)
            key = f"{prefix}.{name}".lstrip(".")
            if key not in keys:
                key = without_wrappers(key)
            if weight is not None and key in keys and not is_quantized(weight):
                found.add(rename(key).removesuffix(".weight"))
    return sorted(found)


def _unwrapped_names(model) -> Callable[[str], str]:
    """Takes out of a name what wrappers add to it."""
    short, modules = {"": ""}, {"": model}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if prefix:
            parent, _, part = prefix.rpartition(".")
            is_added = part == _name_of_wrapped(modules[parent])
            short[prefix] = short[parent] if is_added else f"{short[parent]}.{part}".lstrip(".")
            modules[prefix] = module

    def rename(key):
        prefix, rest = key, []
        while prefix not in short:
            prefix, _, part = prefix.rpartition(".")
            rest.insert(0, part)
        return ".".join(part for part in (short[prefix], *rest) if part)

    return rename


def _renaming(names, model) -> Callable[[str], str]:
    unwrapped_name = _unwrapped_names(model)
    names = {} if names is None else names
    is_mapping = isinstance(names, Mapping)
    if not is_mapping and not callable(names):
        raise TypeError(f"names must be a mapping or a function of names, got {type(names).__name__}")

    def rename(key):
        plain = unwrapped_name(key)
        name = names.get(key, names.get(plain, plain)) if is_mapping else names(plain)
        if not isinstance(name, str):
            raise ValueError(f"names gives {name!r} for {key}, not a string")
        return name

    return rename
