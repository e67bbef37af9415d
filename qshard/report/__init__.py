"""What a model's parameters occupy and send, and which kernels ran."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from qshard import module_state, recipes
from qshard._runtime.classes import Process, TensorState
from qshard._runtime.hooks import compare_writes, holds_codes, local_of
from qshard._runtime.placement import group_names, in_groups, is_strided
from qshard.checkpoint.layouts import block_of
from qshard.dynamic_weights import flat_parameters
from qshard.dynamic_weights.fsdp1 import prepared_units
from qshard.module_state import dynamics_of
from qshard.report import bytes_sent, compatibility
from qshard.report.bytes_sent import Traffic, name_of, split
from qshard.watching import WeightStatistics, last_statistics, table

ops = torch.ops.qshard


@dataclass(frozen=True)
class ParameterReport:
    """One parameter on this rank; sizes in bytes. Under FSDP1 also what is padding in a unit."""

    name: str
    format: str  # a dtype of plain values; "dynamic" after it: plain, and quantized at each use
    shape: tuple[int, ...]
    image: int
    master: int
    grid: int
    pending: int
    gathered: int  # received by one unshard, padding rows included; FSDP2 keeps it as it is
    # Put into the reduction of the gradient over the shards, or over replicas of whole ones: padding rows
    # included, and of a message in few bits, which carries a group of parameters, the part.
    reduced: int
    ranks: int  # over which the parameter is sharded
    gathered_as: str = ""  # "codes", or the dtype of plain values; "" if it is not gathered
    weights_sent: int = 0  # to other ranks in a forward and backward
    gradients_sent: int = 0  # over shards and replicas
    recipe: str = ""  # the class that makes the format
    cut_blocks: str = ""  # how tensor parallelism cuts scale blocks: its bytes are not one device's then


@dataclass(frozen=True)
class Sent:
    """Bytes that leave a rank in one forward and backward."""

    weights: int
    gradients: int
    tokens: int = 0  # to experts on other ranks and back


class Report(list):
    """A list of ParameterReport; prints as a table. `clients`: lines on what it is used with. `statistics`: the
    latest that `qshard.watch` has found, by the names of parameters; empty where none runs."""

    clients: tuple[str, ...] = ()
    tokens_sent = 0
    statistics: dict[str, WeightStatistics] = {}

    def __str__(self) -> str:
        columns = {"image B": "image", "master B": "master", "grid B": "grid", "pending B": "pending",
                   "all-gather B": "gathered", "gradient B": "reduced"}
        rows = [[row.name, row.format, row.recipe, row.shape, *(getattr(row, c) for c in columns.values()),
                 row.gathered_as]
                for row in self]
        sums = [sum(getattr(row, column) for row in self) for column in columns.values()]
        sent = self.sent()
        cut = [f"{row.name} ({row.cut_blocks})" for row in self if row.cut_blocks]
        cut = [f"scale blocks cut by tensor parallelism: {', '.join(cut)}"] if cut else []
        return "\n".join(
            [
                tabulate([*rows, ["total", "", "", "", *sums]],
                         headers=["parameter", "format", "recipe", "shape", *columns, "as"]),
                "",
                f"all-gathered per forward: {sums[-2]:,} B",
                f"sent to other ranks per forward and backward: weights {sent.weights:,} B, "
                f"gradients {sent.gradients:,} B" + f", tokens {sent.tokens:,} B" * (sent.tokens > 0),
                *cut,
                *self.clients,
                *([table(self.statistics)] if self.statistics else []),
                "GEMM backends used so far:",
                ops.backend_report() or "  none",
            ]
        )

    def sent(self) -> Sent:
        """Bytes that leave this rank in one forward and backward with reductions: of what it puts into a
        collective, all but its own part, as by NCCL's rings and by all-to-all, and twice that of an
        all-reduce. Weights that FSDP gathers again in backward count twice. Gradients are those over shards
        and replicas. Tokens are those that qshard sends to experts of other ranks and back, with their gradients, as
        many as in the last forward before the report, and once where backward computes a forward again. Not counted:
        the few bytes of amaxes after `optimizer.step()`, and buffers."""
        weights, gradients = (sum(getattr(row, name) for row in self) for name in ("weights_sent", "gradients_sent"))
        return Sent(weights, gradients, self.tokens_sent)


def report(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Report:
    """Bytes of each parameter's shard on this rank by plane, gathered per unshard, put into the
    reduction of its gradient, and sent per forward and backward under FSDP2, HSDP, FSDP1 and DDP.
    `param_dtype`, `reduce_dtype`: instead of those of FSDP2's MixedPrecisionPolicy. Says, too, whether the
    wrapper, the `optimizer` and the kind of checkpoint are ones that qshard is tested with."""
    result = Report()
    result.clients = tuple(compatibility.lines(model, optimizer))
    result.statistics = last_statistics(model)
    result.tokens_sent = sum(module_state.find(module).tokens_sent for module in model.modules())
    flattened, prepared = set(), prepared_units(model)
    inner = bytes_sent.inner_modules(model, FullyShardedDataParallel)
    for prefix, module in flat_parameters.units(model):
        handle, flat = module._handle, module._handle.flat_param
        flattened.update(map(id, (flat, *(getattr(flat, "_params", None) or ()))))
        rows = list(_flat_rows(prefix, handle, prepared.get(id(handle))))
        gathered, reduced = (sum(getattr(row, f) for row in rows) for f in ("gathered", "reduced"))
        is_inner = id(module) in inner
        result += _with_sent(rows, *bytes_sent.of_unit(module, is_inner, gathered, reduced))
    sent_of = {**bytes_sent.of_ddp(model), **bytes_sent.of_fsdp2(model, param_dtype, reduce_dtype)}
    dynamics = {id(m._parameters.get("weight")): dynamic.format for m, dynamic in dynamics_of(model)}
    for name, param in model.named_parameters():
        if id(param) in flattened:
            continue
        local = local_of(param)
        if holds_codes(local):
            planes = TensorState(local).storage_bytes()
            image, master, grid, pending = (
                planes[plane] for plane in ("image", "master", "grid", "pending")
            )
            format = ops.format(local)
        else:
            image = local.numel() * local.element_size()
            master = grid = pending = 0
            format = name_of(local.dtype)
            if id(param) in dynamics:
                format = f"{dynamics[id(param)]} dynamic"
        sent = asdict(sent_of.get(id(param), Traffic()))
        result.append(
            ParameterReport(
                name, format, tuple(param.shape), image, master, grid, pending, **sent,
                cut_blocks=_cut_blocks(param), recipe=recipes.name_of(format.removesuffix(" dynamic")),
            )
        )
    return result


def _with_sent(rows, weights: int, gradients: int) -> list[ParameterReport]:
    """Rows of one unit, which sends as much."""
    of_weights = split(weights, [row.gathered for row in rows])
    of_gradients = split(gradients, [row.reduced or row.image for row in rows])
    return [
        replace(row, weights_sent=weight, gradients_sent=gradient)
        for row, weight, gradient in zip(rows, of_weights, of_gradients)
    ]


def _flat_rows(prefix: str, handle, unit) -> Iterator[ParameterReport]:
    """Rows of the parameters in a flat parameter of FSDP1, and of its padding. `unit`: how its codes are
    gathered, or None."""
    flat, numel = handle.flat_param, flat_parameters.shard_numel(handle)
    is_sent = flat_parameters.is_sharded(handle)
    is_reduced = is_sent and flat.requires_grad  # all of it, frozen parameters too
    ranks, rank = (handle.world_size, handle.rank) if is_sent else (1, 0)
    dtype = getattr(flat, "_local_shard", flat).dtype
    gather_dtype, reduce_dtype = handle._fwd_bwd_param_dtype, handle._reduce_dtype
    as_codes = {weight.place.index for weight in unit.weights if weight.sends_codes} if unit else ()
    # Each rank sends as much as the others.
    plain = numel * gather_dtype.itemsize
    message = unit.message_bytes(gather_dtype) if as_codes else plain
    left = {
        "image": numel * dtype.itemsize,
        "gathered": is_sent * ranks * message,
        "reduced": is_reduced * ranks * numel * reduce_dtype.itemsize,
    }
    for place in flat_parameters.places(flat):
        begin, end = flat_parameters.range_on(rank, numel, place.start, place.end)
        is_codes, dynamic = place.index in as_codes, flat_parameters.dynamic_of(flat, place)
        sizes = {
            "image": (end - begin) * dtype.itemsize,
            "gathered": is_sent * place.numel * (1 if is_codes else gather_dtype.itemsize),
            "reduced": is_reduced * place.numel * reduce_dtype.itemsize,
        }
        left = {field: left[field] - size for field, size in sizes.items()}
        yield ParameterReport(
            prefix + flat._fqns[place.index],
            f"{dynamic.format} dynamic" if dynamic is not None else name_of(dtype),
            tuple(place.shape), **sizes, recipe="" if dynamic is None else recipes.name_of(dynamic.format), master=0, grid=0, pending=0, ranks=ranks,
            gathered_as=("codes" if is_codes else name_of(gather_dtype)) if is_sent else "",
        )
    if any(left.values()):
        yield ParameterReport(
            f"{prefix}(padding)", "", (), **left, master=0, grid=0, pending=0, ranks=ranks
        )


def _cut_blocks(param) -> str:
    """Where tensor parallelism cuts inside of scale blocks, which begin where its ranks' parts do."""
    local = local_of(param)
    if not holds_codes(local) or not isinstance(param, DTensor) or param.dim() not in (2, 3):
        return ""
    cuts = zip(("rows", "columns"), param.shape[-2:], _largest_part(param)[-2:], block_of(ops.format(local)))
    return ", ".join(
        f"{what} in parts of {length}, blocks of {block}"
        for what, full, length, block in cuts
        if length < full and length % block
    )


def _largest_part(param) -> list[int]:
    """The shape that tensor parallelism leaves the rank with most: what FSDP2 cut."""
    shape = list(param.shape)
    tensor = TensorState(param._local_tensor).groups()
    is_tensor = in_groups(group_names(param.device_mesh), tensor)
    # torch says of a tensor that tensor parallelism cut it by rows before FSDP2.
    has_strided = any(map(is_strided, param.placements))
    for other, size, placement in zip(is_tensor, param.device_mesh.shape, param.placements):
        cuts_rows = placement.is_shard(0) or param.dim() == 3
        is_fsdp = is_strided(placement) or not has_strided and cuts_rows and not other
        if placement.is_shard() and not is_fsdp:
            shape[placement.dim] = -(-shape[placement.dim] // size)
    return shape


def backend_report() -> str:
    """What linears multiply on each device here, and then one line per GEMM path taken so far:
    format, direction, backend, count, and why if it is not a low-precision GEMM. Last, torch's operators that read what codes
    stand for (bmm, _grouped_mm, embedding), and how often."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    lines = [line for i in devices for line in _device_lines(torch.device("cuda", i))]
    lines = lines or _device_lines(torch.device("cpu"))
    return "\n".join(lines) + "\n" + ops.backend_report()


# What is known of GEMMs: "trusted" ones were seen right by `python -m qshard verify` on such a GPU.
_NOTES = {
    "unchecked": " (not seen on such a GPU: checked when a weight arrives)",
    "right": " (not seen on such a GPU before: small products were right)",
}


def _device_lines(device: torch.device) -> list[str]:
    name = str(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name += f" {torch.cuda.get_device_name(device)}, compute capability %d.%d" % capability
    verdicts, formats_by_path = Process.gemm_verdicts(device), {}
    for format, reason in Process.why_dequantized(device).items():
        note = _NOTES.get(verdicts.get(format), "")
        path = f"dequantized GEMM: {reason}" if reason else f"low-precision GEMM{note}"
        formats_by_path.setdefault(path, []).append(format)
    return [f"{name}: {', '.join(formats)}: {path}" for path, formats in formats_by_path.items()]


def debug(enabled: bool = True) -> None:
    """Makes every gather and every optimizer step compare, over the ranks, which parameters were
    written, and raise one RuntimeError on all ranks that names the parameters and the ranks which
    differ. Without it the ranks that wrote wait in a flush for those that did not, until the process
    group's timeout.

    Call it on all ranks, before a forward or a step: the comparison is a collective, one small
    all-reduce per parameter and gather, and waits for the GPU. It is on from the start under
    TORCH_DISTRIBUTED_DEBUG=DETAIL. Gathers in a CUDA graph that is being captured are not compared.
    """
    compare_writes(bool(enabled))


@contextmanager
def trace_fallbacks() -> Iterator[dict[str, int]]:
    """Counts the operators that ran on values of quantized tensors, made for them; the dict is filled when the
    block ends. What only writes a weight, as an optimizer's kernels do, runs on its master, or on the value
    that is kept until the next flush, and is not counted. Blocks may be nested, and run in several threads;
    each has the counts of all threads.

    >>> with qshard.trace_fallbacks() as counts:
    ...     model(x)
    >>> counts
    {'aten::norm.ScalarOpt_dim': 1}
    """
    counts: dict[str, int] = {}
    before = _traces.begin()
    try:
        yield counts
    finally:
        counts.update(Counter(_traces.end()) - Counter(before))


class _Traces:
    """The blocks of trace_fallbacks that are open: the first begins to count, for all, and the last ends it."""

    def __init__(self):
        self.lock, self.open = threading.Lock(), 0

    def begin(self) -> dict[str, int]:
        with self.lock:
            if not self.open:
                Process.set_fallback_tracing(True)
            self.open += 1
            return Process.traced_fallbacks(True)

    def end(self) -> dict[str, int]:
        with self.lock:
            counts = Process.traced_fallbacks(True)
            self.open -= 1
            if not self.open:
                Process.set_fallback_tracing(False)
            return counts


_traces = _Traces()
