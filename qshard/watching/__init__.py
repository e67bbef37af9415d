"""Statistics of what quantizing loses in training: of each weight, its input and its gradient, every few steps."""

import warnings
import weakref
from dataclasses import replace

import torch
from torch import nn

from qshard._runtime import classes
from qshard._runtime.hooks import holds_codes, local_of, of_package
from qshard.model.quantize import flush
from qshard.module_state import dynamics_of
from qshard.watching.sinks import sink_of
from qshard.watching.statistics import TensorStatistics, WeightStatistics, of_weight, table

ops = torch.ops.qshard

__all__ = ["TensorStatistics", "Watch", "WeightStatistics", "last_statistics", "table", "watch"]

_running = weakref.WeakKeyDictionary()  # model: its Watch


class Watch:
    """A running watch, as `qshard.watch` returns it. `last`: dict from names of parameters to the latest
    WeightStatistics. Ends with `remove()`, with its `with` block, or with the model."""

    def __init__(self, model, weights, every, to, step):
        self.last: dict[str, WeightStatistics] = {}
        self._model = weakref.ref(model)
        self._weights = [(name, ops.format(local)) for name, local in weights]
        self._sink = sink_of(to)
        self._arriving = []  # of samples that are on their way to the host: step, numbers, bytes, tensor, event
        self._watch = classes.Watch(every)
        try:
            for number, (_, local) in enumerate(weights):
                self._watch.add(local, number, step)
        except BaseException:
            self._watch.end()
            raise

    def remove(self) -> None:
        """Ends the watch, after the statistics of all sampled steps have been put where they go. Waits for the GPU."""
        self._watch.end()
        self._take()
        self._deliver(waits=True)
        model = self._model()
        if model is not None and _running.get(model) is self:
            del _running[model]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.remove()

    def _take(self):
        """Begins to copy what the flush of a step has left. The host waits for nothing."""
        for step, numbers, sizes, statistics in self._watch.take():
            event = None
            if statistics.is_cuda:
                there = torch.empty(statistics.shape, dtype=statistics.dtype, pin_memory=True)
                with torch.cuda.device(statistics.device):
                    statistics = there.copy_(statistics, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
            self._arriving.append((step, numbers, sizes, statistics, event))

    def _deliver(self, waits=False):
        by_step: dict[int, dict[str, WeightStatistics]] = {}
        while self._arriving:
            step, numbers, sizes, statistics, event = self._arriving[0]
            if event is not None and waits:
                event.synchronize()
            elif event is not None and not event.query():
                break
            del self._arriving[0]
            for i, number in enumerate(numbers):
                name, format = self._weights[number]
                of_name = of_weight(name, format, step, statistics[i], sizes[3 * i : 3 * i + 3])
                by_step.setdefault(step, {})[name] = self.last[name] = of_name
        for step, statistics in by_step.items():
            if self._sink is not None:
                self._sink(step, statistics)


def watch(model: nn.Module, every: int = 100, to=None, *, step: int = 0) -> Watch:
    """Counts what quantizing loses of each quantized weight of `model`, of the input that its linear multiplies, and
    of the gradient of the linear's output, in the optimizer steps whose number `every` divides: amax, scales, shares
    that underflow and saturate, relative error, signal-to-noise ratio (qshard.watching.TensorStatistics). Steps count
    from `step`, which is the one under way.

    A linear counts on the device, when it has quantized an operand. The flush after the optimizer step agrees on the
    counts of all ranks in its all-reduce, and what no flush quantizes, such as a frozen weight, is not watched. Other
    steps than the sampled ones run what they run without a watch. Numbers reach the host a step later, without the
    host waiting for the GPU.

    `to`: where they go, beside `Watch.last` and `qshard.report(model)`. The path of a file, to which rank 0 appends a
    line of JSON for each weight; a torch.utils.tensorboard.SummaryWriter; or a function, called with the number of the
    step and a dict from names of parameters to qshard.watching.WeightStatistics, on each rank that gives one.

    Call it on all ranks, before the same step, on the model as it is trained: after `quantize_`, tensor parallelism,
    `fully_shard` and loading. It is collective where the step under way is sampled, which begins with `qshard.flush`.
    The watch runs until `remove()`, the end of its `with` block, or the end of the model.

    Raises ValueError for a model without trained quantized weights, or with some on the meta device, and for `every`
    below 1 or `step` below 0; RuntimeError where another watch looks at a weight; TypeError for another `to`.
    """
    for name, value, least in (("every", every, 1), ("step", step, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"qshard.watch: {name} must be an integer of at least {least}, got {value!r}")
    sink_of(to)
    quantized = [(n, p, local_of(p)) for n, p in model.named_parameters() if holds_codes(local_of(p))]
    weights = [(name, local) for name, param, local in quantized if param.requires_grad]
    frozen = [name for name, param, _ in quantized if not param.requires_grad]
    on_meta = [name for name, local in weights if local.is_meta]
    if on_meta:
        raise ValueError(
            f"qshard.watch: {on_meta[0]} is on the meta device; call it when the weights have memory, after to_empty() "
            "or loading"
        )
    dynamic = [type(module).__name__ for module, _ in dynamics_of(model)]
    if not weights:
        raise ValueError(
            "qshard.watch: the model has no quantized weight that is trained; call qshard.quantize_(model, recipe) "
            "first. Plain weights that are quantized at each use, as under FSDP1, cannot be watched"
        )
    if frozen or dynamic:
        skipped = [f"{name} (frozen)" for name in frozen] + [f"the weight of a {kind} (plain)" for kind in dynamic]
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        warnings.warn(f"qshard.watch: no flush quantizes these, so they are not watched: {', '.join(skipped[:5])}{more}")
    if step % every == 0:
        flush(model)  # so that this step's weights have codes
    made = Watch(model, weights, every, to, step)
    _running[model] = made
    of_package.take_samples = _take_samples
    return made


def _take_samples():
    for running in list(_running.values()):
        running._take()
        running._deliver()
    if not _running:
        of_package.take_samples = None


def last_statistics(model: nn.Module) -> dict[str, WeightStatistics]:
    """The latest statistics of the parameters of a model, by their names in it, of watches that run on it, on what
    wraps it, or on a part of it."""
    found = {}
    for watched, running in list(_running.items()):
        names = {id(param): name for name, param in watched.named_parameters()}
        for name, param in model.named_parameters():
            known = running.last.get(names.get(id(param), ""))
            if known is not None:
                found[name] = replace(known, name=name)
    return found
