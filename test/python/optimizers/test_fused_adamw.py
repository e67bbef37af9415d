"""The fused step that quantizes what it writes: torch's bits, and the image of those values.

Between step and flush the amaxes of the new values are known, and of some formats the codes are
final: whatever happens to the parameter then, the flush must leave the image of its value.
"""

import copy
import ctypes
import pickle

import pytest
import torch
from dist_helpers import device as rank_device, on_ranks
from dist_helpers import full_mesh, on_ranks
from helpers import (
    FORMATS,
    all_fallbacks,
    assert_same,
    bits,
    fit,
    loaded_as_weights,
    ops,
    quantized_alike,
    state,
    value,
    weight,
)
from models.formats import FORMATS as SHARDED_FORMATS, RECIPES
from models.plain_twins import flush_step
from models.weights import is_dirty, local, mismatching_bytes, unsharded
from test_fsdp_mesh_invariance import Weights
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

import qshard
from qshard.formats import info_of

BUDGET_S = 45
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(256, 384), (150, 140), (1, 16), (33, 129), (3, 40, 24), (0, 16), (7, 0), (160, 8)]
FINAL = ["float8_blockwise", "mxfp8"]  # codes of a step, where no block is cut
SERVED = [f for f in FORMATS if f != "mxfp8_1x32"]  # where no rank shares a block with another
on_devices = pytest.mark.parametrize("device", DEVICES)
formats = pytest.mark.parametrize("fmt", FORMATS)


def fitted(fmt, shape):
    return (*shape[:-2], fit(fmt, shape[-2]), shape[-1])


class Steps:
    """Quantized parameters and plain ones of the same values, stepped alike without an optimizer, so
    that no flush follows."""

    def __init__(self, parameters):
        self.count = 0
        self.lists = [parameters, [value(p) for p in parameters]]
        self.moments = [
            [[torch.zeros_like(p) for p in some] for _ in range(2)] for some in self.lists
        ]
        self.grads = [None, None]
        self.steps = [torch.zeros((), device=p.device) for p in parameters]

    def run(self, lr=1e-2, tensors=None, amsgrad=False, **options):
        """`tensors`: numbers that become tensors on the device, as GradScaler passes them."""
        device = self.lists[0][0].device
        self.count += 1
        torch._foreach_add_(self.steps, 1)
        for name, number in (tensors or {}).items():
            options[name] = torch.tensor(float(number), device=device)
        options = {"weight_decay": 0.1, "maximize": False, "lr": lr} | options
        for i, parameters in enumerate(self.lists):
            self.grads[i] = [
                weight(*p.shape, seed=100 * self.count + j).to(p) for j, p in enumerate(parameters)
            ]
            largest = [torch.zeros_like(p) for p in parameters] if amsgrad else []
            torch._fused_adamw_(
                [p.detach() for p in parameters],
                self.grads[i],
                *self.moments[i],
                largest,
                [step.clone() for step in self.steps],
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                amsgrad=amsgrad,
                **options,
            )

    def check(self):
        """All that torch's step writes is the same, and flushed images show it."""
        parameters, twins = self.lists
        ours, theirs = ([*m, grads] for m, grads in zip(self.moments, self.grads))
        for some, plain in zip(ours, theirs):
            assert all(map(same_bits, some, plain))
        for p, twin in zip(parameters, twins):
            assert same_bits(value(p), twin)
        flush_step([p.detach() for p in parameters if ops.is_quantized(p)])
        for p in parameters:
            if ops.is_quantized(p):
                assert_shows_its_value(p)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def assert_shows_its_value(p):
    """Image and grid are those of quantizing the value from scratch."""
    p = p.detach()
    flush_step([p])
    assert mismatching_bytes(p, value(p)) == 0, (ops.format(p), p.shape)


def quantized(fmt, device, dtype=torch.float32, keep_master=True, shapes=SHAPES):
    shapes = [fitted(fmt, shape) for shape in shapes]
    return [
        ops.quantize(weight(*shape, seed=i, dtype=dtype).to(device), fmt, keep_master=keep_master)
        for i, shape in enumerate(shapes)
    ]


def stepped(fmt, device, dtype=torch.float32):
    """A parameter between its step and the flush."""
    steps = Steps(quantized(fmt, device, dtype, shapes=[(150, 140)]))
    steps.run()
    return steps.lists[0][0]


# ----------------------------------------------------------------------------- the step itself


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@formats
def test_twenty_steps_equal_plain_ones_and_show_their_values(fmt, dtype, device):
    parameters = [Parameter(q) for q in quantized(fmt, device, dtype)]
    twins = [Parameter(value(p)) for p in parameters]
    ours, theirs = (torch.optim.AdamW(ps, lr=1e-2, fused=True) for ps in (parameters, twins))
    for step in range(20):
        for ps in (parameters, twins):
            for i, p in enumerate(ps):
                p.grad = weight(*p.shape, seed=1000 * step + i).to(p)
        with all_fallbacks() as fallbacks:
            ours.step()
        assert ("aten::_fused_adamw_" in fallbacks) == (fmt not in SERVED)
        theirs.step()
        for p, twin in zip(parameters, twins):
            assert same_bits(value(p), twin.detach())
            assert not is_dirty(p)
            assert mismatching_bytes(p.detach(), twin.detach()) == 0
    for p, twin in zip(parameters, twins):
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(ours.state[p][name], theirs.state[twin][name])


@on_devices
@formats
def test_every_option_steps_as_torch(fmt, device):
    steps = Steps(quantized(fmt, device))
    for options in (
        dict(weight_decay=0.0),
        dict(maximize=True),
        dict(tensors=dict(grad_scale=8.0)),
        dict(tensors=dict(grad_scale=8.0, found_inf=0.0)),
        dict(tensors=dict(lr=0.0123)),
        dict(lr=torch.tensor(0.0123)),  # on the CPU
        dict(amsgrad=True),
    ):
        steps.run(**options)
        steps.check()


@on_devices
@pytest.mark.parametrize("written_before", [False, True])
@formats
def test_found_inf_changes_nothing(fmt, written_before, device):
    steps = Steps(quantized(fmt, device))
    steps.run()
    steps.check()
    before = [state(p) for p in steps.lists[0]]
    if written_before:
        for p in (*steps.lists[0], *steps.lists[1]):
            p.mul_(0.7)
    steps.run(tensors=dict(found_inf=1.0, grad_scale=2.0))
    assert all(is_dirty(p) for p in steps.lists[0])
    ops._flush_after_step(
        steps.lists[0], [0] * len(before), [False] * len(before), torch.ones((), device=device)
    )
    steps.check()
    if not written_before:
        for p, (geometry, *planes) in zip(steps.lists[0], before):
            for after, plane in zip(state(p)[1:], planes):
                assert torch.equal(bits(after), bits(plane)), geometry


@on_devices
def test_lists_of_all_kinds(device):
    """What the fused kernel does not take goes to torch's, in the same call."""
    whole = ops.quantize(weight(70, 60).to(device), "nvfp4", keep_master=True)
    parameters = [
        *quantized("float8_blockwise", device),
        *quantized("mxfp8_1x32", device),
        *quantized("float8_delayed", device),
        weight(5, 7).to(device),
        ops.quantize(weight(9, 32, seed=5).to(device), "float8_tensorwise"),
        *quantized("mxfp8", device),
        whole,
        *quantized("nvfp4", device),
        weight(3, seed=4).to(device),
    ]
    steps = Steps(parameters)
    with all_fallbacks() as fallbacks:
        steps.run()
    assert fallbacks["aten::_fused_adamw_"] == 1
    for p in parameters:
        if ops.is_quantized(p):
            assert is_dirty(p)
    steps.check()
    Steps([whole[3:50], parameters[0]]).run()
    assert_shows_its_value(whole)
    assert_shows_its_value(parameters[0])


@on_devices
@pytest.mark.parametrize("fmt", ["float8_1x128", "float8_1xK", "mxfp8_1x32[rowwise]"])
def test_rows_of_activations_take_torchs_step(fmt, device):
    """No kernel makes their codes in the step."""
    steps = Steps(quantized(fmt, device))
    with all_fallbacks() as fallbacks:
        steps.run()
    assert fallbacks["aten::_fused_adamw_"] == 1
    steps.check()


@on_devices
@formats
def test_without_a_master_steps_stay_as_they_were(fmt, device):
    steps = Steps(quantized(fmt, device, keep_master=False))
    steps.run()
    for p, twin in zip(*steps.lists):
        assert same_bits(value(p), twin)  # pending
    flush_step(steps.lists[0])
    for p, twin in zip(*steps.lists):
        assert_same(ops.dequantize(p), ops.dequantize(quantized_alike(twin, p)))


@on_devices
def test_more_parameters_than_a_launch_holds(device):
    shapes = [(1 + 7 * i % 150, 1 + 11 * i % 140) for i in range(150)]
    for fmt in SERVED:
        steps = Steps(quantized(fmt, device, shapes=shapes))
        steps.run()
        steps.check()


@on_devices
@pytest.mark.parametrize("fmt", SERVED)
def test_unaligned_gradients_step_as_aligned_ones(fmt, device):
    """As FSDP2 hands them out: views of a reduce-scatter's result."""
    p = Parameter(quantized(fmt, device, shapes=[(64, 48)])[0])
    twin = Parameter(value(p))
    for q in (p, twin):
        memory = torch.zeros(64 * 48 + 3, device=device)
        q.grad = memory[3:].view(64, 48).copy_(weight(64, 48, seed=9))
        torch.optim.AdamW([q], lr=1e-2, fused=True).step()
    assert same_bits(value(p), twin.detach())
    assert mismatching_bytes(p.detach(), twin.detach()) == 0


def test_a_step_moves_the_version_counter_once():
    q = quantized("mxfp8", "cpu", shapes=[(64, 64)])[0]
    alias = ops.master(q)
    before = q._version, alias._version
    Steps([q]).run()
    # One counter: a master is the tensor's own memory.
    assert (q._version, alias._version) == (before[0] + 1, before[1] + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch's CPU kernel checks nothing")
def test_errors_are_torchs_own_and_leave_the_parameters():
    parameters = quantized("float8_blockwise", "cuda", shapes=[(32, 32), (16, 32)])
    before = [state(p) for p in parameters]
    steps = Steps(parameters)
    steps.moments[0][0][1] = torch.zeros(3, 3, device="cuda")
    with pytest.raises(RuntimeError, match="same dtype, device, and layout"):
        steps.run()
    for p, (_, *planes) in zip(parameters, before):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(state(p)[1:], planes))


# ----------------------------------------------------------------------- between step and flush

WRITES = {
    "clamp_": lambda q: q.clamp_(-0.1, 0.1),
    "rows": lambda q: q[3:5].zero_(),
    "one element": lambda q: q[149, 139].fill_(1e4),
    "copy_ of values": lambda q: q.copy_(weight(*q.shape, seed=7)),
    "copy_ of rows": lambda q: q[:70].copy_(q.detach().clone()[80:150]),
    "copy_ of undefined rows": lambda q: q[:128].copy_(torch.empty_like(q)[:128]),
    "an alias of the master": lambda q: ops.master(q).mul_(3),
    "rows of the alias": lambda q: ops.master(q)[4:6].fill_(100),
    "_foreach_mul_": lambda q: torch._foreach_mul_([q], 0.3),
    "mark": lambda q: ops._mark_written(q),
    "another step": lambda q: Steps([q]).run(),
}


@on_devices
@pytest.mark.parametrize("write", WRITES)
@formats
def test_a_write_before_the_flush_is_what_the_flush_shows(fmt, write, device):
    q = stepped(fmt, device)
    with torch.no_grad():
        WRITES[write](q)
    assert_shows_its_value(q)


@on_devices
@formats
def test_reads_before_the_flush_show_the_step(fmt, device):
    q = stepped(fmt, device)
    assert is_dirty(q)
    written = quantized(fmt, device, shapes=[(150, 140)])[0].copy_(value(q))
    ops.codes(written)
    whole = quantized_alike(value(q), q)
    assert_same(ops.dequantize(q), ops.dequantize(whole))
    assert torch.equal(ops.codes(q).view(torch.uint8), ops.codes(whole).view(torch.uint8))
    assert is_dirty(q)  # ranks may still have to meet
    assert_shows_its_value(q)
    flush_step([written])
    (_, *planes), (_, *expected) = state(q), state(written)
    for plane, want in zip(planes, expected):
        assert torch.equal(bits(plane), bits(want))  # histories of amaxes, too


def rows_of(q):
    """A smaller tensor of the first rows, as sharding makes it."""
    chunk = q.new_zeros((64, *q.shape[1:]))
    chunk.copy_(q[:64])
    return chunk


COPIES = {
    "clone": lambda q: q.clone(),
    "deepcopy": lambda q: copy.deepcopy(q),
    "deepcopy of a parameter": lambda q: copy.deepcopy(Parameter(q)).detach(),
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": loaded_as_weights,
    "to bf16": lambda q: q.to(torch.bfloat16),
    "to the CPU": lambda q: q.to("cpu", copy=True),
    "non-blocking": lambda q: q.to("cpu", copy=True, non_blocking=True),
    "copy_": lambda q: torch.empty_like(q).copy_(q),
    "new_zeros": lambda q: q.new_zeros(q.shape).copy_(q),
}


@on_devices
@pytest.mark.parametrize("name", COPIES)
@formats
def test_copies_before_the_flush_show_their_value(fmt, name, device):
    q = stepped(fmt, device)
    was = value(q)
    with torch.no_grad():
        copied = COPIES[name](q)
    expected = was.to(copied.dtype)
    assert_same(value(copied), expected.to(copied.device))
    assert_shows_its_value(copied)
    with torch.no_grad():  # they share nothing that a write reaches
        copied.mul_(3)
    assert_shows_its_value(copied)
    assert_same(q, was)
    assert_shows_its_value(q)


@on_devices
@formats
def test_a_chunk_copied_before_the_flush(fmt, device):
    q = stepped(fmt, device)
    with torch.no_grad():
        chunk = rows_of(q)
    assert_same(value(chunk), value(q)[:64])
    assert_same(chunk + 0, value(q)[:64])
    assert_shows_its_value(q)


@on_devices
def test_state_dict_before_the_flush(device):
    for fmt in FORMATS:
        linear = torch.nn.Linear(64, 64, bias=False, device=device)
        linear.weight = Parameter(stepped_like(linear, fmt))
        other = copy.deepcopy(linear)
        other.weight.data.zero_()
        other.load_state_dict(linear.state_dict())
        assert_same(value(other.weight), value(linear.weight))
        assert_shows_its_value(other.weight)
        assert_shows_its_value(linear.weight)


def stepped_like(linear, fmt):
    steps = Steps([ops.quantize(linear.weight.detach(), fmt, keep_master=True)])
    steps.run()
    return steps.lists[0][0]


def marked(q):
    """Whether a flush leaves a code as it is that a raw write, unnoticed, has put there."""
    codes = ops.codes(q).view(torch.uint8)
    mark = int(codes.flatten()[0]) ^ 1
    ctypes.memset(codes.data_ptr(), mark, 1)
    return lambda: int(ops.codes(q).view(torch.uint8).flatten()[0]) == mark


@pytest.mark.parametrize("fmt", FINAL)
def test_codes_of_a_step_are_not_made_again(fmt):
    q = stepped(fmt, "cpu")
    stays = marked(q)
    flush_step([q])
    assert stays()


# -------------------------------------------------------------------------------------- shards

# Cut between blocks of every size, on 2 and 3 ranks or on 2; cut within; with ranks without rows.
SHARDED_SHAPES = [(768, 140), (256, 96), (257, 64), (100, 48), (96, 40), (3, 32), (1, 16)]
AFTER_THE_STEP = {
    "hook": lambda model: torch.optim.SGD(model.parameters()).step(),  # no gradients: a flush
    "gather": lambda model: None,
    "flush": lambda model: qshard.flush(model),
    "write": lambda model: [local(w).detach().clamp_(-0.5, 0.5) for w in model.weights],
}


def sharded(fmt, shapes):
    """A model of such weights, and the shards of this rank, which know their group."""
    model = Weights([weight(*shape, seed=i).to(rank_device()) for i, shape in enumerate(shapes)])
    qshard.quantize_(model, RECIPES[fmt])
    fully_shard(model, mesh=full_mesh())
    with unsharded(model):
        pass
    return model, [local(w).detach() for w in model.weights]


@pytest.mark.parametrize("fmt", FINAL)
@on_ranks(2, devices=("cpu",))
def test_codes_of_shards_are_not_made_again(fmt):
    _, shards = sharded(fmt, [(256, 96)])
    Steps(shards).run()
    stays = marked(shards[0])
    flush_step(shards)
    assert stays()


@pytest.mark.parametrize("fmt", SHARDED_FORMATS)
@on_ranks(2, 3)
def test_shards_have_the_codes_of_the_whole_weight(fmt):
    """Mismatching bytes of weights that were stepped, and then written, flushed or just gathered."""
    counts = {}
    for name, then in AFTER_THE_STEP.items():
        model, shards = sharded(fmt, [fitted(fmt, shape) for shape in SHARDED_SHAPES])
        steps = Steps(shards)
        for step in range(2):
            with torch.no_grad():
                with all_fallbacks() as fallbacks:
                    steps.run()
                assert not fallbacks or info_of(fmt).gemm.scale_mode == "1x32"  # of cut blocks, or two images
                assert all(map(is_dirty, shards)), "also where a rank has no rows"
                then(model)
            values = [w.detach().full_tensor() for w in model.weights]
            with unsharded(model):
                wrong = sum(mismatching_bytes(w, v) for w, v in zip(model.weights, values))
            counts[name, step] = wrong, sum(map(is_dirty, shards))
    assert set(counts.values()) == {(0, 0)}, counts
