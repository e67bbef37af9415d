"""The functions of the library's classes (ops/classes.cpp), in the form in which the fuzzer takes operators."""

from typing import NamedTuple

import torch

from qshard._runtime.classes import Process, SavedTensor, TensorState, Watch

SAVED = {
    "bytes": "Tensor", "pending": "Optional[Tensor]", "layout": "List[int]", "format": "str", "size": "List[int]",
    "stride": "List[int]", "storage_offset": "int", "dtype": "int", "state": "List[Tensor]",
}  # fmt: skip
# torch does not show the schemas of functions that belong to no object.
STATIC = {
    "TensorState.written_by_rank": {
        "self": "List[Tensor]", "has_grad": "List[bool]", "rank": "int", "world": "int",
    },
    "Process.number_of_groups": {
        "shard": "str", "tensor": "List[str]", "replicas": "List[str]", "columns": "List[str]",
    },
    "Process.set_in_step": {"in_step": "bool"},
    "Process.make_shards": {"rank": "Optional[int]"},
    "Process.set_fallback_tracing": {"enabled": "bool"},
    "Process.traced_fallbacks": {"reads_only": "bool"},
    "Process.why_dequantized": {"device": "Device"},
    "Process.gemm_verdicts": {"device": "Device"},
    "Process.shares_input_codes": {"input": "Tensor"},
    "Process.check_codes_can_be_read": {"weights": "List[Tensor]"},
    "Process.foreign_owner_of_key": {},
}  # fmt: skip


class Argument(NamedTuple):
    name: str
    type: str
    kwarg_only: bool = False
    alias_info: None = None


class Method:
    """A function, with what the fuzzer asks of an operator's schema: a name and arguments. It is called with a
    method's tensor, or with what a SavedTensor is made of, as the first arguments."""

    returns = ()  # of an operator: which results are aliases

    def __init__(self, name, types, call):
        self.name, self.call = f"qshard::{name}", call
        self.arguments = [Argument(argument, str(kind)) for argument, kind in types.items()]


def saved(method, before=0):
    """`before`: how many arguments come before those of the SavedTensor."""

    def call(*arguments):
        return getattr(SavedTensor(*arguments[before:]), method)(*arguments[:before])

    return call


def methods():
    """Every function of the classes, by "Class.name"."""
    sample = TensorState(torch.zeros(1))
    found = {}
    for name in sample._method_names():
        if name.startswith("__"):
            continue
        arguments = sample._get_method(name).schema.arguments[1:]
        types = {"self": "Tensor"} | {argument.name: argument.type for argument in arguments}
        found[f"TensorState.{name}"] = (types, lambda t, *rest, name=name: getattr(TensorState(t), name)(*rest))
    for name, types in STATIC.items():
        owner, function = name.split(".")
        found[name] = (types, getattr({"TensorState": TensorState, "Process": Process}[owner], function))
    of_watch = {"weight": "Tensor", "number": "int", "step": "int"}
    found["Watch.add"] = (of_watch, lambda *arguments: Watch(2).add(*arguments))
    found["SavedTensor.read"] = (SAVED, saved("read"))
    found["SavedTensor.read_later"] = (SAVED, saved("read_later"))
    found["SavedTensor.read_into"] = ({"self": "Tensor"} | SAVED, saved("read_into", 1))
    found["SavedTensor.over_shared_planes"] = (
        {"master": "Optional[Tensor]"} | SAVED,
        saved("over_shared_planes", 1),
    )
    return {name: Method(name, *rest) for name, rest in found.items()}
