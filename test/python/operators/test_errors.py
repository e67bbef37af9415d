"""Bad input: each call fails with an error that says what is wrong, and changes nothing."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_unchanged, state

import qshard
from qshard._runtime.classes import SavedTensor, TensorState

ops = torch.ops.qshard
FORMAT = "float8_blockwise"


def make(rows=200, cols=48, **kwargs):
    torch.manual_seed(0)
    return ops.quantize(torch.randn(rows, cols), FORMAT, **kwargs)


def impostor(q):
    return torch.ops.inductor._reinterpret_tensor(q, tuple(q.shape), q.stride(), 0)


def unpack(fields, size=64, format=FORMAT):
    """What a pickle of a 4 x 8 tensor calls, with other bytes or fields."""
    data = torch.zeros(size, dtype=torch.uint8)
    return SavedTensor(data, None, fields, format, [4, 8], [8, 1], 0, torch.float32, []).read()


def two_images(rows=64):
    return ops.quantize(torch.randn(rows, 48), "mxfp8_1x32")


def codes_only(q):
    return ops.quantize(q + 0, FORMAT)


X = torch.randn(4, 48)

# name: (call on a quantized 200 x 48 tensor, fragment of the error)
CALLS = {
    # raw bytes never show: without a master there is no address
    "data_ptr": (lambda q: codes_only(q).data_ptr(), "bytes of float8_blockwise are codes"),
    "numpy": (lambda q: codes_only(q).numpy(), "bytes of float8_blockwise are codes"),
    "dlpack": (lambda q: torch.from_dlpack(codes_only(q)), "bytes of float8_blockwise are codes"),
    "array": (lambda q: memoryview(q), "a bytes-like object is required"),
    "view dtype": (lambda q: q.view(torch.uint8), "aten::view.dtype"),
    "view_as_complex": (lambda q: torch.view_as_complex(q.view(200, 24, 2)), "view_as_complex"),
    # views that do not fit
    "view of other numel": (lambda q: q.view(3, 7), "shape '?\\[3, 7\\]'? is invalid"),
    "view of a transpose": (lambda q: q.t().view(-1), "cannot be viewed"),
    "as_strided beyond": (lambda q: q.as_strided((201, 48), (48, 1)), "does not lie within"),
    "as_strided negative strides": (
        lambda q: q.as_strided((2, 2), (-1, 1), 5),
        "[Nn]egative strides|none below 0",
    ),
    "as_strided negative size": (lambda q: q.as_strided((-2,), (1,)), "none below 0"),
    "as_strided negative offset": (lambda q: q.as_strided((2,), (1,), -1), "none below 0"),
    "as_strided extent beyond 2^63": (
        lambda q: q.as_strided((3, 2), (2**62, 1)),
        "does not lie within",
    ),
    "as_strided end beyond 2^63": (
        lambda q: q.as_strided((2,), (2**62,), 2**62),
        "does not lie within",
    ),
    "as_strided of nothing beyond 2^63": (
        lambda q: q.as_strided((0, 2), (48, 1), 2**63 - 1),
        "does not lie within",
    ),
    "as_strided numel beyond 2^63": (
        lambda q: q.as_strided((2**32, 2**32), (0, 0)),
        "numel: integer multiplication overflow",
    ),
    "as_strided lengths": (lambda q: q.as_strided((2, 2), (1,)), "mismatch in length"),
    "as_strided offset": (lambda q: q.as_strided((1,), (1,), 9600), "does not lie within"),
    "select index": (lambda q: q.select(0, 200), "out of range"),
    "select dim": (lambda q: q.select(2, 0), "Dimension out of range"),
    "slice step": (lambda q: torch.ops.aten.slice(q, 0, 0, 9, 0), "step must be positive"),
    "split size": (lambda q: q.split(0), "split_size"),
    "transpose dim": (lambda q: q.transpose(0, 2), "Dimension out of range"),
    "t of 3-D": (lambda q: q.view(2, 100, 48).t(), "<= 2 dimensions"),
    "narrow": (lambda q: q.narrow(0, 150, 51), "exceeds dimension size"),
    "permute": (lambda q: q.permute(0, 0), "aten::permute on a .*duplicate dims"),
    "unfold size": (lambda q: q.unfold(0, 300, 1), "aten::unfold on a .*maximum size"),
    "expand": (lambda q: q.expand(3, 48), "aten::expand on a .*must match"),
    # in-place changes of shape or storage
    "resize_": (lambda q: q.resize_(10, 10), "aten::resize_"),
    "resize_as_": (lambda q: q.resize_as_(X), "aten::resize_as_ would change the shape"),
    "set_ to a tensor": (
        lambda q: q.set_(torch.randn(3)),
        r"aten::set_: a .* takes the values of .* got plain Float\[3\] on cpu; assign",
    ),
    "plain.set_(q)": (lambda q: torch.randn(200, 48).set_(q), "copy_.. copies the values"),
    "set_ to nothing": (lambda q: q.set_(), "aten::set_"),
    "set_ to another storage": (
        lambda q: q.set_(torch.randn(3).untyped_storage(), 0, (200, 48), (48, 1)),
        "a storage of 12 bytes does not hold the (values|codes and scales) of a",
    ),
    "set_ to a storage of another device": (
        lambda q: q.set_(torch.empty(9600, device="meta").untyped_storage(), 0, (200, 48), (48, 1)),
        "set_: a storage on meta cannot become that of a .* on cpu; use .to",
    ),
    "set_ to a tensor of another device": (
        lambda q: q.set_(ops.quantize(torch.empty(200, 48, device="meta"), FORMAT)),
        "set_: the memory of a .* on meta cannot become that of a .* on cpu; use .to",
    ),
    "t_ of 3-D": (lambda q: q.view(2, 100, 48).t_(), "t_ expects a tensor with <= 2"),
    "squeeze_ dim": (lambda q: q.squeeze_(5), "aten::squeeze_"),
    "data = plain": (lambda q: setattr(q, "data", torch.randn(200, 48)), "x.data.copy_"),
    "data = another shape": (
        lambda q: setattr(q, "data", torch.randn(3)),
        r"put a plain Float\[3\] on cpu tensor in the place of",
    ),
    "data = another dtype": (lambda q: setattr(q, "data", torch.zeros(200, 48).half()), "x.data.copy_"),
    "data = integers": (lambda q: setattr(q, "data", torch.zeros(200, 48).int()), "x.data.copy_"),
    "plain.data = q": (lambda q: setattr(torch.randn(200, 48), "data", q), "incompatible"),
    "as_strided_ beyond": (
        lambda q: q.as_strided_((201, 48), (48, 1)),
        "aten::as_strided_ on a .*bounds",
    ),
    "storage": (lambda q: codes_only(q).storage(), "their bytes are codes and scales"),
    # tensors that only carry the key, as code made by Inductor's cpp_wrapper makes them
    "impostor read": (lambda q: impostor(q) + 1, "is not a quantized tensor; a compiler"),
    "impostor written": (lambda q: impostor(q).zero_(), "is not a quantized tensor; a compiler"),
    "impostor copied": (lambda q: q.copy_(impostor(q)), "is not a quantized tensor; a compiler"),
    "impostor in a list": (
        lambda q: torch._foreach_mul_([impostor(q), q], 2.0),
        "is not a quantized tensor; a compiler",
    ),
    # in-place operators that cannot
    "add_ shape": (lambda q: q.add_(torch.randn(3)), "size of tensor a .48. must match"),
    "add_ wider result": (lambda q: q[:1].add_(torch.randn(5, 48)), "doesn't match the broadcast"),
    "mul_ complex": (lambda q: q.mul_(1j), "can't be cast"),
    "index_add_ index": (
        lambda q: q.index_add_(0, torch.tensor([999]), X[:1]),
        "index 999 is out of bounds",
    ),
    "copy_ shape": (lambda q: q.copy_(torch.randn(7, 48)), "copy_: a source of shape"),
    "copy_ quantized shape": (lambda q: q.copy_(make(100)), "copy_: a source of shape"),
    "copy_ into expanded": (
        lambda q: q[:1].expand(3, 48).copy_(X[:3]),
        "refers to a single memory location",
    ),
    "foreach add_": (lambda q: torch._foreach_add_([q], [torch.randn(3)]), "must match the size"),
    "addmm_ shape": (lambda q: q.addmm_(X, X), "shapes cannot be multiplied"),
    "masked_fill_": (lambda q: q.masked_fill_(torch.ones(3), 0), "only supports boolean masks"),
    "uniform_": (lambda q: q.uniform_(2, 1), "uniform_ expects"),
    "foreach lists": (lambda q: torch._foreach_add_([q, q], [X]), "same number of tensors"),
    # out=
    "out= too small": (lambda q: torch.add(torch.ones(300, 48), 1, out=q), "cannot be resized"),
    "out= of another shape": (lambda q: torch.mm(X, X.t(), out=q), "cannot be resized"),
    "out= integer result": (
        lambda q: torch.view_as_real(q, out=q),
        "unexpected keyword argument 'out'",
    ),
    # quantize and its accessors
    "quantize format": (lambda q: ops.quantize(X, "float9"), "unknown format 'float9'; known"),
    "quantize dtype": (lambda q: ops.quantize(X.int(), FORMAT), "expected a float32, bfloat16"),
    "quantize double": (lambda q: ops.quantize(X.double(), FORMAT), "got Double"),
    "quantize 1-D": (lambda q: ops.quantize(X[0], FORMAT), "at least 2 dimensions"),
    "quantize sparse": (
        lambda q: ops.quantize(X.to_sparse(), FORMAT),
        "expected a strided tensor, got layout Sparse",
    ),
    "quantize rows": (lambda q: ops.quantize(X, FORMAT, logical_rows=3), "do not lie within"),
    "quantize offset": (
        lambda q: ops.quantize(X, FORMAT, logical_rows=9, row_offset=6),
        r"rows \[6, 10\) do not lie within logical_rows=9",
    ),
    "quantize negative": (lambda q: ops.quantize(X, FORMAT, row_offset=-1), "row_offset=-1 .*none may be negative"),
    "quantize matrices": (
        lambda q: ops.quantize(torch.randn(2, 3, 8), FORMAT, logical_rows=7),
        "not a whole number of matrices",
    ),
    "dequantize plain": (lambda q: ops.dequantize(X), "expected a quantized tensor"),
    "dequantize dtype": (lambda q: ops.dequantize(q, dtype=torch.int8), "floating point dtype"),
    "codes plain": (lambda q: ops.codes(X), "expected a quantized tensor"),
    "codes of odd view": (lambda q: ops.codes(q[:, ::2]), "not a window of rows"),
    "scale_inv of columns": (lambda q: ops.scale_inv(q[:, 3:9]), "not a window of whole rows"),
    "columnwise_codes plain": (lambda q: ops.columnwise_codes(X), "expected a quantized tensor"),
    "columnwise_codes": (lambda q: ops.columnwise_codes(q), "has one row image"),
    "columnwise_scale_inv": (lambda q: ops.columnwise_scale_inv(q), "has one row image"),
    "columnwise_scale_inv of part of a block": (
        lambda q: ops.columnwise_scale_inv(two_images()[3:35]),
        "whole blocks of 32 rows",
    ),
    "quantize rows of part of a block": (
        lambda q: ops.quantize(torch.randn(40, 48), "mxfp8_1x32"),
        "mxfp8_1x32 needs matrices of a multiple of 32 rows, got 40.*use the format mxfp8, whose blocks are 32x32",
    ),
    "phase of one image": (lambda q: ops.quantize(X, "mxfp8[phase]"), "has no option 'phase'"),
    "format plain": (lambda q: ops.format(X), "expected a quantized tensor"),
    "master plain": (lambda q: ops.master(X), "expected a quantized tensor"),
    "flush plain": (lambda q: ops.flush([X]), "expected a quantized tensor"),
    "flush of a shard": (
        lambda q: ops.flush([ops.quantize(X, FORMAT, logical_rows=9)]),
        "no reduction group is known",
    ),
    "codes of a written shard": (
        lambda q: ops.codes(ops.quantize(X, FORMAT, logical_rows=9)),
        "share scales with rows on other ranks",
    ),
    "linear of a written shard": (
        lambda q: F.linear(X, ops.quantize(X, FORMAT, logical_rows=9)),
        "Call qshard.flush",
    ),
    # linear
    "linear input": (lambda q: F.linear(X[:, :5], q), "does not fit a weight of shape"),
    "linear bias": (lambda q: F.linear(X, q, torch.ones(3)), "bias of shape"),
    "linear dtype": (lambda q: F.linear(X.double(), q), "input dtype Double"),
    "linear plain weight": (lambda q: ops.linear(X, torch.randn(8, 48)), "the weight is a plain"),
    "linear scalar": (lambda q: F.linear(torch.tensor(1.0), q), "input of shape"),
    "mm dtype": (lambda q: torch.mm(X.bfloat16(), q.t()), "same dtype"),
    "mm shape": (lambda q: torch.mm(X, q), "shapes cannot be multiplied"),
    # devices
    "to cuda": (lambda q: q.to("cuda:99"), "CUDA|cuda|device|NVIDIA"),
    "out of meta": (lambda q: q.to("meta").to("cpu"), "out of the meta device|no data"),
    "item": (lambda q: q.item(), "cannot be converted to Scalar"),
    # autograd
    "backward of codes": (
        lambda q: ops.codes(q.requires_grad_()).float().sum().backward(),
        "does not require grad",
    ),
    # files
    "foreign pickle": (
        lambda q: SavedTensor(
            torch.zeros(3, dtype=torch.uint8), None, [1], FORMAT, [1], [1], 0, torch.float32, []
        ).read(),
        "not a saved quantized tensor",
    ),
    "pickle of another size": (
        lambda q: unpack([4, 8, 4, 4, 0, 0, 0], size=3),
        "which take .* bytes, but holds 3",
    ),
    "pickle of a wrong placement": (
        lambda q: unpack([4, 8, 4, 3, 9, 0, 0]),
        "impossible placement",
    ),
    "pickle of another image": (
        lambda q: unpack([4, 8, 4, 4, 0, 0, 0, 1]),
        "row images that its format does not have",
    ),
    "pickle of impossible rows": (
        lambda q: unpack([2**62, 8, 4, 4, 0, 0, 0]),
        "impossible size",
    ),
    "pickle of an unknown format": (
        lambda q: unpack([4, 8, 4, 4, 0, 0, 0], format="f9"),
        "unknown format",
    ),
    "pickle of a view beyond": (
        lambda q: SavedTensor(
            TensorState(make(4, 16)).pack()[0],
            None,
            TensorState(make(4, 16)).pack()[2],
            FORMAT,
            [5, 16],
            [16, 1],
            0,
            torch.float32,
            [],
        ).read(),
        "does not lie within",
    ),
}


@pytest.mark.parametrize("keep_master", [False, True], ids=["codes", "master"])
@pytest.mark.parametrize("name", CALLS)
def test_error_names_the_problem_and_changes_nothing(name, keep_master):
    call, fragment = CALLS[name]
    q = make(keep_master=keep_master)
    before = state(q)
    with torch.no_grad() if name != "backward of codes" else torch.enable_grad():
        with pytest.raises(Exception, match=fragment):
            call(q)
    assert_unchanged(q.detach(), before)


def test_the_table_is_large_enough():
    assert len(CALLS) >= 60


def test_a_group_that_is_not_there_is_an_error_and_leaves_the_update_pending():
    q = ops.quantize(torch.randn(4, 48), FORMAT, keep_master=True, logical_rows=8)
    with pytest.raises(RuntimeError, match="no such group"):
        TensorState(q).set_reduction_group("no such group")
    with pytest.raises(RuntimeError, match="Call qshard.flush"):
        ops.codes(q)


def test_unpickling_garbage_is_an_error_not_a_crash():
    payload = bytearray(pickle.dumps(make(4, 16)))
    for position in range(0, len(payload), 7):
        broken = bytearray(payload)
        broken[position] ^= 0xFF
        try:
            pickle.loads(bytes(broken))
        except Exception:
            pass


def test_a_freed_gathered_tensor_is_an_error_not_a_crash():
    q = make()
    image = ops._pre_all_gather(q, "")
    gathered = ops._post_all_gather(q, image.clone(), torch.bfloat16)
    with pytest.raises(RuntimeError, match="without fsdp_pre_all_gather"):
        ops._post_all_gather(q, image.clone(), torch.bfloat16)
    gathered.untyped_storage().resize_(0)
    for call in (
        lambda: gathered + 1,
        lambda: F.linear(X.bfloat16(), gathered),
        lambda: ops.codes(gathered),
        lambda: ops.dequantize(gathered),
        lambda: gathered.clone(),
        lambda: pickle.dumps(gathered),
    ):
        with pytest.raises(RuntimeError, match="was freed"):
            call()


def test_quantize_after_first_forward_is_refused():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(48, 16))
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        model(X)
        with pytest.raises(RuntimeError, match="before the first forward"):
            qshard.quantize_(model, qshard.Float8BlockScaling())
        assert not qshard.is_quantized(model[0].weight)
    finally:
        dist.destroy_process_group()
