"""quantized_tensors."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qshard.checkpoint import engines, layouts
from qshard.checkpoint.model import entries_of
from qshard.checkpoint.plan import Plan
from qshard.checkpoint.planes import planes_of, tensors_of
from qshard.checkpoint.ranks import Ranks, ToAll, ToOne, check_same
from qshard.checkpoint.shard_regions import boxes_of, own_boxes
from qshard.model.quantize import flush_any_written

_FUNCTION = "qshard.checkpoint.quantized_tensors"
_VALUES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SentTensors:
    """Bytes that a rank sent to others."""

    quantized: int = 0  # codes and scales, and values of weights that are quantized whole
    plain: int = 0


def quantized_tensors(
    model: nn.Module,
    *,
    layout: str,
    names=None,
    scale_fmt: str = "float",
    plain_dtype: torch.dtype | None = torch.bfloat16,
    dst: int | None = None,
    bucket_bytes: int = 256 * 2**20,
    fused: Mapping[str, Sequence[str]] | None = None,
) -> "TensorStream":
    """The codes and scales that a model multiplies by, and its plain tensors, one after the other as inference engines
    load them: an iterator of `(name, tensor)`, with the names, dtypes and bytes of `save_quantized`'s files. Nothing is
    quantized twice.

    model: plain, or after `fully_shard`, `parallelize_module` or both: then a collective of all ranks of its meshes.
        Weights travel as codes. Every rank takes the whole stream, whether or not it gets tensors.
    layout: of `save_quantized`; or "vllm", "sglang", of float8_blockwise in those engines' memory, with linears of one input
        as one.
    names, scale_fmt: as for `save_quantized`. "sglang" has "ue8m0", too: as DeepGEMM reads exponents on Blackwell.
    plain_dtype: in which plain floating-point parameters travel; None: each in its own. Buffers keep theirs.
    dst: the rank of the world that gets the tensors: on others the iterator yields none. None: all ranks.
    bucket_bytes: what is gathered at once, at most; a larger tensor is gathered by itself. Beside a bucket, a rank holds
        the tensors of one weight.
    fused: for "vllm" and "sglang": {name: names of its parts} in place of {"qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj")}: the packed_modules_mapping of the engine's model.

    One all-reduce tells the ranks what any of them has written; that is flushed, and all that can be refused is raised, on
    every rank, before anything is sent. Then the order is fixed, and no rank waits for another's decision. A rank that
    leaves the loop early, or by an exception, makes the others wait until their process group's timeout, whose
    error names the tensor; `with quantized_tensors(...) as stream:` takes part in what is left when the block ends, on
    an error, too. Tensors are the caller's own memory. The model is not to be written before the stream ends.

    What `save_quantized` quantizes together, or as a whole, is quantized so here; `stream.requantized` names these weights,
    and a warning does. `stream.sent()` counts bytes.
    """
    arguments = dict(
        layout=layout, scale_fmt=scale_fmt, plain_dtype=plain_dtype, dst=dst, bucket_bytes=bucket_bytes, fused=fused
    )
    plan, ranks = planned(model, names, _FUNCTION, "the tensors' values", arguments)
    dst = None if dst is None else ranks.in_world.index(dst)
    stream = TensorStream(plan, ranks, buckets_of(plan.units, bucket_bytes), lambda bucket: dst, copies=True)
    for said in plan.warnings if ranks.rank == 0 else []:
        warnings.warn(f"{_FUNCTION}: {said}", stacklevel=2)
    return stream


def planned(model, names, function, product, arguments):
    """(plan, ranks) of a flushed model. A collective that sends a few numbers; what it refuses it raises on all ranks."""
    ranks = Ranks.of_model(model, function)
    with ranks.agreeing() as models:
        _check(arguments, ranks)
        entries = entries_of(model, names)
        models.tell((arguments, own_boxes(entries)))
    of_ranks, boxes_of_ranks = zip(*models.everywhere)
    with ranks.agreeing() as plans:
        check_same(of_ranks)
        boxes = boxes_of(entries, boxes_of_ranks, ranks)
        plain_dtype = arguments["plain_dtype"]

        def dtype_of(entry):
            is_cast = plain_dtype and entry.is_parameter and entry.tensor.dtype in _VALUES
            return plain_dtype if is_cast else entry.tensor.dtype

        layout, scale_fmt = arguments["layout"], arguments["scale_fmt"]
        fusion = engines.Fusion(layout, _mapping(layout, arguments["fused"]))
        plan = Plan(entries, boxes, layout, scale_fmt, product, dtype_of, fusion)
        plans.tell(plan.order)
    settle(plan, model, ranks, plans.everywhere)
    return plan, ranks


def settle(plan, model, ranks, orders) -> None:
    """Makes the codes of all that any rank has written, and fixes what is sent in which order. A collective. orders: all
    ranks' `plan.order`; those of other tensors are an error on all ranks."""
    if len(set(orders)) > 1:
        raise ValueError(
            f"{ranks.function}: ranks have other tensors, or in another order; `names` has to be the same on all of them"
        )
    with torch.no_grad():
        flush_any_written(model)
        plan.group(ranks)


def _check(arguments, ranks):
    layouts.check(arguments["layout"], arguments["scale_fmt"])
    plain_dtype, dst, bucket_bytes = (arguments[k] for k in ("plain_dtype", "dst", "bucket_bytes"))
    if plain_dtype is not None and plain_dtype not in _VALUES:
        raise TypeError(f"plain_dtype must be a floating-point dtype or None, not {plain_dtype!r}")
    if dst is not None and dst not in ranks.in_world:
        raise ValueError(f"dst must be one of the model's ranks, {', '.join(map(str, ranks.in_world))}, not {dst!r}")
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be a positive number of bytes, not {bucket_bytes!r}")


def _mapping(layout, fused):
    if layout not in layouts.ENGINES:
        if fused is not None:
            raise ValueError(f"layout {layout!r} fuses nothing; `fused` is for {', '.join(layouts.ENGINES)}")
        return {}
    return engines.FUSED if fused is None else dict(fused)


class TensorStream:
    """What `quantized_tensors` gives: an iterator of `(name, tensor)`, to be taken whole by every rank.

    requantized: names in the model of weights that were quantized for this, whose values are not those of its codes."""

    def __init__(self, plan, ranks, buckets, dst_of, *, agrees=False, copies=False, exact=None):
        """buckets: lists of units that are gathered at once, on rank `dst_of(bucket)` or, for None, on all. agrees: before
        each gather the ranks tell each other of errors. copies: no tensor is memory of the model or of others. exact: as of
        `tensors_of`."""
        self._plan, self._ranks, self._buckets, self._dst_of = plan, ranks, buckets, dst_of
        self._agrees, self._copies, self._exact = agrees, copies, exact
        self.requantized = tuple(e.key for unit in plan.units if unit.is_requantized for e in unit.entries)
        self._next, self._ready = 0, iter(())
        self._sent = {"quantized": 0, "plain": 0}

    def sent(self) -> SentTensors:
        """Bytes that this rank has sent to others, so far: what it put into messages, times the ranks that get it where all
        of them do, as by a ring."""
        return SentTensors(**self._sent)

    def __iter__(self):
        return self

    def __next__(self):
        while (named := next(self._ready, None)) is None:
            if self._next == len(self._buckets):
                raise StopIteration
            self._ready = _named(self._plan, self._gather(), self._exact, self._copies)
        return named

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.drain()

    def drain(self) -> None:
        """Takes part in what is left, for the other ranks."""
        self._ready = iter(())
        while self._next < len(self._buckets):
            self._gather()

    def close(self) -> None:
        """Raises RuntimeError where other ranks wait for more of this rank's."""
        waited_for = self._waited_for()
        self._end()
        if waited_for:
            raise RuntimeError(
                f"{self._ranks.function}: this rank left the stream before {waited_for}, for which the other ranks wait; "
                "take all of it on every rank, or use `with quantized_tensors(...) as stream:`"
            )

    def __del__(self):
        waited_for = self._waited_for()
        if waited_for:
            warnings.warn(
                f"{self._ranks.function}: this rank left the stream before {waited_for}, for which the other ranks wait until "
                "their timeout; use `with quantized_tensors(...) as stream:`, which takes part in the rest",
                RuntimeWarning,
                stacklevel=2,
            )

    def _end(self):
        self._next, self._ready = len(self._buckets), iter(())

    def _waited_for(self):
        """The name of what other ranks cannot have without this one."""
        if self._ranks.size == 1 or self._next == len(self._buckets):
            return None
        return next(iter(self._buckets[self._next][0].tensors))

    def _gather(self):
        bucket = self._buckets[self._next]
        first = next(iter(bucket[0].tensors))
        try:
            with self._ranks.agreeing() if self._agrees else contextlib.nullcontext():
                planes = [planes_of(unit, self._plan) for unit in bucket]
                flat, dst = [plane for of_unit in planes for plane in of_unit], self._dst_of(bucket)
                exchange = ToAll(flat, self._ranks) if dst is None else ToOne(flat, self._ranks, dst)
            try:
                pieces = exchange.run()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self._ranks.function}: {first} did not come from all ranks: one has left or met an error; "
                    "take the whole stream on every rank, or use `with quantized_tensors(...) as stream:`"
                ) from error
        except BaseException:
            self._end()
            raise
        self._next += 1
        is_plain = [unit.is_plain for unit, of_unit in zip(bucket, planes) for _ in of_unit]
        for plain, count in zip(is_plain, exchange.sent):
            self._sent["plain" if plain else "quantized"] += count
        return bucket, planes, pieces


def _named(plan, gathered, exact, copies):
    """Pairs of a gathered bucket. A function: a generator of the stream's own would keep the stream alive."""
    bucket, planes, pieces = gathered
    if pieces is None:
        return
    pieces = iter(pieces)
    for unit, of_unit in zip(bucket, planes):
        wholes = [plane.whole(next(pieces)) for plane in of_unit]
        for name, tensor in tensors_of(unit, plan, wholes, exact).items():
            yield name, own(tensor, of_unit) if copies else tensor


def own(tensor: torch.Tensor, planes) -> torch.Tensor:
    """The tensor in memory that holds nothing else, and is not the model's. What is not contiguous was made for it."""
    storage = tensor.untyped_storage()
    is_own = storage.nbytes() == tensor.nbytes and all(
        storage.data_ptr() != plane.local.untyped_storage().data_ptr() for plane in planes
    )
    return tensor if is_own or not tensor.is_contiguous() else tensor.clone()


def buckets_of(units, most: int) -> list[list]:
    """Units in their order, in lists of at most so many bytes or of one unit."""
    buckets, size = [], 0
    for unit in units:
        if not buckets or size + unit.nbytes > most:
            buckets.append([])
            size = 0
        buckets[-1].append(unit)
        size += unit.nbytes
    return buckets
