"""Contexts that note the collectives within them, and what they send."""

import contextlib

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def collectives():
    """Yields a list that holds, after the block, (operator, input sizes) of every collective that
    this rank entered, from whatever language it was called."""
    calls = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profile:
        yield calls
    for event in profile.events():
        if event.name.startswith("c10d::"):
            calls.append((event.name.removeprefix("c10d::").strip("_"), event.input_shapes))


class Sent:
    """What a rank gives to gathers (dtype, elements), and the names of its other collectives, from whatever language they
    are called."""

    DTYPES = {"unsigned char": torch.uint8, "float": torch.float32, "c10::BFloat16": torch.bfloat16}

    def __init__(self):
        self.gathered, self.reduced = [], []

    def __enter__(self):
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
        )
        self.profile.__enter__()
        return self

    def __exit__(self, *exc):
        self.profile.__exit__(*exc)
        for event in self.profile.profiler.kineto_results.events():
            if event.name() == "c10d::_allgather_base_":
                self.gathered.append((self.DTYPES[event.dtypes()[1]], torch.Size(event.shapes()[1]).numel()))
            elif event.name().startswith("c10d::"):
                self.reduced.append(event.name())


@contextlib.contextmanager
def noted(names, note):
    """Yields a list of note(input) for every call of these functions of torch.distributed, (output, input, …)."""
    stock, notes = {name: getattr(dist, name) for name in names}, []

    def recorded(name):
        def call(output, input, *args, **kwargs):
            notes.append(note(input))
            return stock[name](output, input, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, recorded(name))
    try:
        yield notes
    finally:
        for name in names:
            setattr(dist, name, stock[name])


class ExchangedRows(TorchDispatchMode):
    """Notes (dtype, shape) of what is put into all-to-alls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.calls.append((args[0].dtype, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))

    def dtypes(self):
        return [dtype for dtype, _ in self.calls]

    def in_codes(self):
        """Shapes of those of bytes."""
        return [shape for dtype, shape in self.calls if dtype == torch.uint8]


# How often what a rank puts into a collective leaves it for each other rank, per rank.
_SENT = {"all_gather_into_tensor": None, "all_gather": None, "reduce_scatter_tensor": 1, "all_to_all_single": 1,
         "all_reduce": 2}


@contextlib.contextmanager
def bytes_sent():
    """Yields a list of (collective, bytes that leave this rank) of those that are asked for in Python: all
    that is put into one but the rank's own part, and of an all-reduce, by a ring, twice that."""
    stock, sent = {}, []

    def recorded(name, at, factor):
        def call(*args, **kwargs):
            *_, tensor = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
            ranks = (kwargs.get("group") or dist.group.WORLD).size()
            agrees = name == "all_reduce" and kwargs.get("op") == dist.ReduceOp.MAX  # on amaxes
            sent.append(("agreement" if agrees else name, tensor.nbytes * (ranks - 1) * (factor or ranks) // ranks))
            return stock[at](*args, **kwargs)

        return call

    for name, factor in _SENT.items():
        for at in {name, single_or(name)}:
            stock[at] = getattr(dist, at)
            setattr(dist, at, recorded(name, at, factor))
    try:
        yield sent
    finally:
        for at, function in stock.items():
            setattr(dist, at, function)


def sent_by(calls, *names):
    return sum(nbytes for name, nbytes in calls if name in names)


def single_or(name):
    """The name by which FSDP calls a collective: torch 2.15 has another one."""
    single = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    return single if hasattr(dist, single) else name


def gathers(note):
    """Yields a list of note(input) for every all-gather that FSDP2 asks for."""
    return noted([single_or("all_gather_into_tensor")], note)


def count(calls, name):
    return sum(call == name for call, _ in calls)
