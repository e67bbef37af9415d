"""Collectives carry values: beside plain peers, other formats, windows and masters, every
collective on quantized tensors does what it does on plain tensors of the same values."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from dist_helpers import device, on_ranks
from helpers import assert_same, assert_unchanged, is_quantized, rounded, state, value, weight
from models.weights import is_dirty
from torch.distributed.distributed_c10d import _coalescing_manager

from qshard._runtime.classes import TensorState

ops = torch.ops.qshard
c10d_functional = torch.ops._c10d_functional

# ------------------------------------------------------------------- the tensors of a rank


def quantized(values, fmt="float8_blockwise", keep_master=True):
    return ops.quantize(values.contiguous(), fmt, keep_master=keep_master)


def as_rows(values, fmt, keep_master):
    """A window in the middle of a bigger quantized tensor."""
    above, below = torch.ones(32, values.shape[1]), torch.ones(5, values.shape[1])
    parts = [above.to(values), values, below.to(values)]
    return quantized(torch.cat(parts), fmt, keep_master)[32 : 32 + len(values)]


def as_columns(values, fmt, keep_master):
    wide = torch.cat([values, torch.ones_like(values)], 1)
    return quantized(wide, fmt, keep_master)[:, : values.shape[1]]


def as_written(values, fmt, keep_master):
    q = quantized(torch.ones_like(values), fmt, keep_master)
    q.copy_(values)
    return q


def as_shard(values, fmt, keep_master):
    """One of several shards of a bigger tensor, written and not flushed: only all ranks together
    could flush it."""
    zeros = torch.zeros_like(values)
    q = ops.quantize(zeros, fmt, keep_master=keep_master, logical_rows=4 * len(values))
    q.copy_(values)
    return q


DENSE = {
    "plain": lambda values: values.clone(),
    "whole": lambda values: quantized(values),
    "whole, codes only": lambda values: quantized(values, "nvfp4", False),
    "rows": lambda values: as_rows(values, "mxfp8", True),
    "rows, codes only": lambda values: as_rows(values, "float8_tensorwise", False),
    "written, codes only": lambda values: as_written(values, "float8_blockwise", False),
    "delayed": lambda values: quantized(values, "float8_delayed"),
    "shard": lambda values: as_shard(values, "float8_blockwise", True),
    "shard, codes only": lambda values: as_shard(values, "mxfp8", False),
    "device copy": lambda values: quantized(values).to(device(), non_blocking=True),
}
STRIDED = {
    "transposed": lambda values: quantized(values.t()).t(),
    "transposed, codes only": lambda values: quantized(values.t(), "mxfp8", False).t(),
    "columns": lambda values: as_columns(values, "float8_blockwise", True),
    "columns, codes only": lambda values: as_columns(values, "nvfp4", False),
}
KINDS = DENSE | STRIDED


class Tensors:
    """Hands a case its tensors and notes them. The twin's are plain, with the same values."""

    def __init__(self, kinds, step, dtype, twin=None):
        self.kinds, self.step, self.dtype, self.twin = list(kinds), step, dtype, twin
        self.values, self.tensors, self.received = [], [], set()

    def __call__(self, *shape, received=False):
        """This rank's next tensor: of another kind than those before it and those of its peers."""
        i = len(self.tensors)
        if self.twin is not None:
            tensor = self.twin.values[i].clone()
        else:
            kind = self.kinds[(self.step + dist.get_rank() + 3 * i) % len(self.kinds)]
            seed = 100 * dist.get_rank() + i
            values = weight(*(shape or (16, 48)), seed=seed, dtype=self.dtype).to(device())
            tensor = KINDS[kind](values)
        self.values.append(value(tensor).contiguous())
        self.tensors.append(tensor)
        if received:
            self.received.add(i)
        return tensor

    def into(self, *shape):
        """The same, to receive into."""
        return self(*shape, received=True)


def finish(work, a):
    assert (work is not None) == bool(a)
    if a:
        work.wait()


# ------------------------------------------------------------------------------- the cases
# case(new, rank, size, a): `a` are the keyword arguments of an asynchronous call, or none. What a
# case returns is compared too.


def broadcast(new, rank, size, a):
    for source in (0, size - 1):
        finish(dist.broadcast(new.into(), source, **a), a)


def broadcast_coalesced(new, rank, size, a):
    tensors = [new.into(), new.into(3, 8), new.into()]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 2048, 0)


def all_reduce(new, rank, size, a):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        finish(dist.all_reduce(new.into(), op, **a), a)


def all_reduce_coalesced(new, rank, size, a):
    finish(dist.all_reduce_coalesced([new.into(), new.into(3, 8)], **a), a)


def all_reduce_in_a_coalescing_manager(new, rank, size, a):
    with _coalescing_manager():
        dist.all_reduce(new.into())
        dist.all_reduce(new.into(3, 8))


def reduce(new, rank, size, a):
    finish(dist.reduce(new.into(), 0, **a), a)


def all_gather(new, rank, size, a):
    finish(dist.all_gather([new.into() for _ in range(size)], new(), **a), a)


def all_gather_into_quantized_lists_of_plain(new, rank, size, a):
    source = value(new()).contiguous()  # NCCL asks for that of plain tensors
    finish(dist.all_gather([new.into() for _ in range(size)], source, **a), a)


def all_gather_coalesced(new, rank, size, a):
    shapes = ((16, 48), (3, 8))
    outputs = [[new.into(*shape) for shape in shapes] for _ in range(size)]
    finish(dist.all_gather_coalesced(outputs, [new(*shape) for shape in shapes], **a), a)


def all_gather_into_tensor(new, rank, size, a):
    finish(dist.all_gather_into_tensor(new.into(16 * size, 48), new(), **a), a)


def all_gather_into_itself(new, rank, size, a):
    """In place: the input is a window of the output."""
    output = new.into(16 * size, 48)
    finish(dist.all_gather_into_tensor(output, output[16 * rank : 16 * (rank + 1)], **a), a)


def all_gather_into_tensors_in_a_coalescing_manager(new, rank, size, a):
    with _coalescing_manager():
        dist.all_gather_into_tensor(new.into(16 * size, 48), new())
        dist.all_gather_into_tensor(new.into(3 * size, 8), new(3, 8))


def gather(new, rank, size, a):
    outputs = [new.into() for _ in range(size)] if rank == 1 else None
    finish(dist.gather(new(), outputs, dst=1, **a), a)


def scatter(new, rank, size, a):
    inputs = [new() for _ in range(size)] if rank == 1 else None
    finish(dist.scatter(new.into(), inputs, src=1, **a), a)


def scatter_quantized_list_into_plain(new, rank, size, a):
    inputs = [new() for _ in range(size)] if rank == 0 else None
    output = torch.empty(16, 48, dtype=new.dtype, device=device())
    finish(dist.scatter(output, inputs, src=0, **a), a)
    return output


def reduce_scatter(new, rank, size, a):
    finish(dist.reduce_scatter(new.into(), [new() for _ in range(size)], **a), a)


def reduce_scatter_tensor(new, rank, size, a):
    finish(dist.reduce_scatter_tensor(new.into(), new(16 * size, 48), **a), a)


def reduce_scatter_in_a_coalescing_manager(new, rank, size, a):
    with _coalescing_manager():
        dist.reduce_scatter_tensor(new.into(), new(16 * size, 48))
        dist.reduce_scatter_tensor(new.into(3, 8), new(3 * size, 8))


def all_to_all(new, rank, size, a):
    outputs, inputs = ([make() for _ in range(size)] for make in (new.into, new))
    finish(dist.all_to_all(outputs, inputs, **a), a)


def all_to_all_single(new, rank, size, a):
    finish(dist.all_to_all_single(new.into(2 * size, 48), new(2 * size, 48), **a), a)
    # Rank r sends i + 1 rows to rank i.
    output, input = new.into((rank + 1) * size, 48), new(size * (size + 1) // 2, 48)
    splits = [rank + 1] * size, [i + 1 for i in range(size)]
    finish(dist.all_to_all_single(output, input, *splits, **a), a)


def functional(new, rank, size, a):
    """One after the other. Gloo's two threads note the name of what each has completed in one string,
    without a lock (ProcessGroupGloo::runLoop, pgStatus_): several collectives in flight corrupt the heap
    in about one of 50,000, of plain tensors as of ours (seen in torch 2.11, without qshard)."""
    group = dist.group.WORLD.group_name

    def run(op, *args):
        results = op(*args, group)
        for result in results if isinstance(results, list) else [results]:
            assert not is_quantized(result)
            yield c10d_functional.wait_tensor(result)

    f = c10d_functional
    return [
        *run(f.all_reduce, new(), "sum"),
        *run(f.all_reduce_coalesced, [new(), new(3, 8)], "max"),
        *run(f.broadcast, new(), 1),
        *run(f.all_gather_into_tensor, new(), size),
        *run(f.all_gather_into_tensor_coalesced, [new(), new(3, 8)], size),
        *run(f.reduce_scatter_tensor, new(16 * size, 48), "sum", size),
        *run(f.reduce_scatter_tensor_coalesced, [new(2 * size, 8)], "sum", size),
        *run(f.all_to_all_single, new(size, 8), [1] * size, [1] * size),
    ]


def functional_in_place(new, rank, size, a):
    group = dist.group.WORLD.group_name

    def check(result, tensor):
        assert result is tensor and c10d_functional.wait_tensor(tensor) is tensor

    tensors = [new.into() for _ in range(4)]
    check(c10d_functional.all_reduce_(tensors[0], "sum", group), tensors[0])
    check(c10d_functional.broadcast_(tensors[1], size - 1, group), tensors[1])
    results = c10d_functional.all_reduce_coalesced_(tensors[2:], "max", group)
    for result, tensor in zip(results, tensors[2:]):
        check(result, tensor)
    out = new.into(16 * size, 48)
    check(c10d_functional.all_gather_into_tensor_out(new(), size, group, out=out), out)
    out, input = new.into(), new(16 * size, 48)
    check(c10d_functional.reduce_scatter_tensor_out(input, "sum", size, group, out=out), out)


def functional_autograd(new, rank, size, a):
    """_c10d_functional_autograd, by itself and by torch's functions: results and gradients."""
    group, direct = dist.group.WORLD, torch.ops._c10d_functional_autograd
    ones, name = [1] * size, group.group_name

    def run(op, input, *args):
        input.requires_grad_()
        result = op(input, *args)
        assert not is_quantized(result)
        result = functional_collectives.wait_tensor(result)
        (result * result.detach()).sum().backward()
        assert not is_quantized(input.grad)
        yield from (result.detach(), input.grad)
        input.requires_grad_(False)

    return [
        *run(direct.all_gather_into_tensor, new(), size, name),
        *run(direct.reduce_scatter_tensor, new(16 * size, 48), "sum", size, name),
        *run(direct.all_to_all_single, new(size, 8), ones, ones, name),
        *run(functional_collectives.all_gather_tensor_autograd, new(), 1, group),
        *run(functional_collectives.reduce_scatter_tensor_autograd, new(3, 8 * size), "sum", 1, group),
        *run(functional_collectives.all_to_all_single_autograd, new(size, 8), ones, ones, group),
    ]


def send_and_receive(new, rank, size, a):
    """Both directions at once, and blocking calls."""
    for peer in (peer for peer in range(size) if peer != rank):
        # Gloo matches calls in any order. NCCL runs those of a pair one after the other.
        receives_first = dist.get_backend() == "gloo" or rank < peer
        works = []
        for receives in (receives_first, not receives_first):
            works += [dist.irecv(new.into(), peer) if receives else dist.isend(new(), peer)]
        for work in works:
            work.wait()
        for sends in (rank < peer, rank > peer):
            dist.send(new(), peer) if sends else dist.recv(new.into(), peer)


def batched_send_and_receive(new, rank, size, a):
    right, left = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.irecv, new.into(), left), dist.P2POp(dist.isend, new(), right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def receive_from_anyone(new, rank, size, a):
    if dist.get_backend() == "nccl":  # has no such receive, and a send would wait for one
        q = quantized(weight(16, 48).to(device()))
        if rank == 0:
            with pytest.raises(NotImplementedError, match="(?i)recv_?anysource"):
                dist.recv(q)
    elif rank == 0:
        assert dist.recv(new.into()) == 1
    elif rank == 1:
        dist.send(new(), 0)


COLLECTIVES = (
    *(broadcast, broadcast_coalesced, all_reduce, all_reduce_coalesced, reduce),
    *(all_reduce_in_a_coalescing_manager, all_gather, all_gather_into_quantized_lists_of_plain),
    *(all_gather_coalesced, all_gather_into_tensor, all_gather_into_itself),
    *(all_gather_into_tensors_in_a_coalescing_manager, gather, scatter),
    *(scatter_quantized_list_into_plain, reduce_scatter, reduce_scatter_tensor),
    *(reduce_scatter_in_a_coalescing_manager, all_to_all, all_to_all_single),
)
FUNCTIONAL = (functional, functional_in_place, functional_autograd)
POINT_TO_POINT = (send_and_receive, batched_send_and_receive, receive_from_anyone)
# What some torch's backends do not have: there the plain twins raise, and so must ours.
MISSING = {
    "gloo": {all_to_all},  # 2.15 has it
    "nccl": {all_gather_coalesced},
}


def check_written(tensor):
    """Received: it awaits a flush, which shows it in the image."""
    if not is_quantized(tensor):
        return
    assert is_dirty(tensor)
    rows, cols, logical_rows, *_ = TensorState(tensor).pack()[2]
    if tensor.shape != (rows, cols) or rows != logical_rows or not tensor.is_contiguous():
        return
    before, fmt = value(tensor), ops.format(tensor)
    ops.flush([tensor])
    if fmt != "float8_delayed":
        assert_same(ops.dequantize(tensor), rounded(before, fmt), "codes")


def outcome(case, new, a):
    try:
        return case(new, dist.get_rank(), dist.get_world_size(), a), None
    except (NotImplementedError, RuntimeError) as error:
        return None, str(error)


def run_cases(cases, kinds, is_async):
    a = {"async_op": True} if is_async else {}
    for case in cases:
        for step in range(len(kinds)):
            dtype = torch.bfloat16 if step % 2 else torch.float32
            new = Tensors(kinds, step, dtype)
            result, error = outcome(case, new, a)
            twin = Tensors(kinds, step, dtype, twin=new)
            twin_result, twin_error = outcome(case, twin, a)
            note = f"{case.__name__}, kinds from {step}"
            missing = twin_error is not None
            assert not missing or case in MISSING[dist.get_backend()], f"{note}: {twin_error}"
            assert (error is not None) == missing, f"{note}: {error}"
            results, twins = (r if isinstance(r, list) else [r] for r in (result, twin_result))
            for got, want in zip(results, twins, strict=True):
                if want is not None:
                    assert_same(got, want, note)
            for i, (tensor, plain) in enumerate(zip(new.tensors, twin.tensors, strict=True)):
                if case is not reduce or dist.get_rank() == 0:  # others may hold partial sums
                    assert_same(tensor, plain, f"{note}, tensor {i}")
                if i in new.received and not missing:
                    check_written(tensor)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@on_ranks(2, 3)
def test_collectives_between_all_kinds_of_peers(is_async):
    run_cases(COLLECTIVES, tuple(KINDS), is_async)


@on_ranks(2, 3)
def test_functional_collectives_between_all_kinds_of_peers():
    run_cases(FUNCTIONAL, tuple(KINDS), False)


@on_ranks(2, 3)
def test_point_to_point_between_all_kinds_of_peers():
    run_cases(POINT_TO_POINT, tuple(DENSE), False)


# ------------------------------------------------------------------------------- the others


@on_ranks(2)
def test_object_collectives_pickle():
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in ("whole", "rows, codes only", "written, codes only", "shard", "transposed"):
        make = KINDS[kind]
        values = [weight(16, 48, seed=seed).to(device()) for seed in range(size)]
        values = [value(make(v)) for v in values]
        mine = {"weight": make(values[rank]), "rank": rank}

        def check(received, source):
            assert received["rank"] == source
            # Unpickled tensors lie on the device that they were pickled from.
            assert_same(received["weight"].to(device()), values[source], kind)
            assert is_quantized(received["weight"]) == is_quantized(mine["weight"])

        objects = [mine if rank == 0 else None]
        dist.broadcast_object_list(objects, 0)
        check(objects[0], 0)

        objects = [None] * size
        dist.all_gather_object(objects, mine)
        for source in range(size):
            check(objects[source], source)

        objects = [None] * size if rank == 1 else None
        dist.gather_object(mine, objects, 1)
        for source in range(size) if rank == 1 else ():
            check(objects[source], source)

        objects = [None]
        dist.scatter_object_list(objects, [mine] * size if rank == 1 else None, 1)
        check(objects[0], 1)


@on_ranks(2)
def test_what_is_refused_is_refused_before_anything_is_sent():
    size = dist.get_world_size()
    values = weight(16, 48).to(device())
    for kind, make in STRIDED.items():
        q = make(values)
        before = state(q)
        for call in (dist.irecv, dist.recv):
            with pytest.raises(RuntimeError, match="recv_: Tensors must be contiguous.*strides"):
                call(q, 0)
            assert_unchanged(q, before)
            assert not is_dirty(q), kind
    for kind, make in DENSE.items():
        q = make(values)
        if not is_quantized(q) or "copy" in kind:
            continue
        before = state(q)
        with pytest.raises(RuntimeError, match="more than one element"):
            dist.broadcast(q[:1].expand(4, 48), 0)
        with pytest.raises((RuntimeError, ValueError), match="size"):
            dist.all_gather_into_tensor(q, values.repeat(3, 1))
        if dist.get_backend() == "gloo":  # NCCL takes lists of any length
            with pytest.raises((RuntimeError, ValueError), match="expected length|must match"):
                dist.all_gather([q[:4], q[4:8]] * size, values[:4])  # windows of one buffer
        assert_unchanged(q, before)
    # The group still works: nothing had been sent.
    total = torch.ones(1, device=device())
    dist.all_reduce(total)
    assert total.item() == size


# What c10d's schemas do not say: which arguments are received.
RECEIVED = {"output", "outputs", "output_tensor", "output_tensors", "output_lists", "tensors"}
READ = {"input", "inputs", "input_tensor", "input_tensors", "input_list"}
READ |= {"sparse_indices", "tensor"}  # `tensor` of a barrier


def test_every_collective_is_known():
    names = torch._C._dispatch_get_all_op_names()
    collectives = [n for n in names if n.startswith(("c10d::", "_c10d_functional::", "_dtensor::"))]
    tensor_arguments = 0
    for name in collectives:
        schema = torch._C._get_schema(*(name.split(".") if "." in name else (name, "")))
        tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
        defined_later = name == "_c10d_functional::_wrap_tensor_autograd"  # in Python
        if tensors and not defined_later:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse3"), name
        for argument in tensors if name.startswith("c10d::") else ():
            assert argument.name in RECEIVED | READ, f"{name}: is {argument.name} written?"
            tensor_arguments += 1
    assert len(collectives) >= 30 and tensor_arguments >= 30
