"""What new_zeros, new_empty and the like make of a quantized weight is plain to all who use it:
operators, optimizers, pickles, NumPy, compiled code. What is no weight is not rounded."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import FORMATS, assert_same, fit, is_quantized, ops, quantized_alike, value, weight
from torch import nn

from qshard.formats import info_of

formats = pytest.mark.parametrize("fmt", FORMATS)
keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
ROWS, COLS = 96, 64


def make(fmt="float8_blockwise", keep_master=True, rows=ROWS, cols=COLS):
    return ops.quantize(weight(fit(fmt, rows), cols), fmt, keep_master=keep_master)


def plain_like(shape, seed=4):
    return weight(*shape, seed=seed) if len(shape) > 1 else weight(1, *shape, seed=seed)[0]


NEW = {
    "new_zeros": lambda w, shape: w.new_zeros(shape),
    "new_empty": lambda w, shape: w.new_empty(shape),
    "new_ones": lambda w, shape: w.new_ones(shape),
    "new_full": lambda w, shape: w.new_full(shape, 3.0),
    "empty_strided": lambda w, shape: w.new_empty_strided(shape, torch.empty(shape).stride()),
}
new_ones = pytest.mark.parametrize("new", NEW)
# No rows of a (96, 64) matrix have these.
NO_SHARDS = [(), (64,), (96,), (4, 32), (8, 65), (97, 64), (1000, 64), (2, 96, 64), (64, 96)]
SHARDS = [(96, 64), (4, 64), (1, 64), (33, 64), (0, 64)]


@new_ones
@keep_or_not
@formats
def test_what_cannot_be_a_shard_is_an_ordinary_tensor(fmt, keep_master, new):
    w = make(fmt, keep_master)
    ordinary = torch._C._dispatch_keys(torch.empty(0)).raw_repr()
    # deepcopy and the like fill new_empty(()) by set_.
    for shape in NO_SHARDS[1:] if new == "new_empty" else NO_SHARDS:
        for dtype in (None, torch.bfloat16):
            t = NEW[new](w if dtype is None else w.to(dtype), shape)
            assert not is_quantized(t), shape
            assert torch._C._dispatch_keys(t).raw_repr() == ordinary, shape
            assert t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.itemsize


@formats
def test_of_another_dtype_it_is_an_ordinary_tensor(fmt):
    for dtype in (torch.int64, torch.bool, torch.float64, torch.uint8):
        t = make(fmt).new_zeros(4, COLS, dtype=dtype)
        assert not is_quantized(t) and t.dtype == dtype


PRODUCTS = {
    "@": lambda a, t: a @ t.t(),
    "from the left": lambda a, t: t @ a.t(),
    "linear": F.linear,
    "mm out=": lambda a, t: torch.mm(a, t.t(), out=torch.empty(0)),
    "bmm": lambda a, t: torch.bmm(a[None], t.t()[None]),
    "outer": lambda a, t: a @ (t.t() @ t),
    "einsum": lambda a, t: torch.einsum("ij,kj->ik", a, t),
    "embedding": lambda a, t: F.embedding(torch.arange(t.shape[0]).flip(0), t),
    "addmm": lambda a, t: torch.addmm(torch.ones(t.shape[0]), a, t.t()),
    "attention": lambda a, t: F.scaled_dot_product_attention(a[None], t[None], t[None]),
    "cosine": lambda a, t: F.cosine_similarity(a[:, None], t[None], dim=-1),
}
FILLS = {
    "copy_": lambda t: t.copy_(plain_like(t.shape)),
    "row by row": lambda t: [t[i].copy_(row) for i, row in enumerate(plain_like(t.shape))],
    "set rows": lambda t: [t.__setitem__(i, row) for i, row in enumerate(plain_like(t.shape))],
    "add_": lambda t: t.zero_().add_(plain_like(t.shape)),
    "index_copy_": lambda t: t.index_copy_(0, torch.arange(len(t)), plain_like(t.shape)),
    "out=": lambda t: torch.mul(plain_like(t.shape), 2, out=t),
    "normal_": lambda t: t.normal_(generator=torch.Generator().manual_seed(1)),
    "columns": lambda t: [t[:, i::2].copy_(plain_like(t.shape)[:, i::2]) for i in (0, 1)],
    "foreach": lambda t: torch._foreach_copy_([t], [plain_like(t.shape)]),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fill", FILLS)
@new_ones
@keep_or_not
@formats
def test_a_product_of_it_is_plain(fmt, keep_master, new, fill, product):
    for shape in [s for s in (*SHARDS[:4], (4, 32), (97, 64))]:
        t, twin = (NEW[new](w, shape) for w in (make(fmt, keep_master), torch.zeros(ROWS, COLS)))
        for _ in range(2):
            FILLS[fill](t), FILLS[fill](twin)
            a = weight(5, shape[1], seed=7)
            assert torch.equal(PRODUCTS[product](a, t), PRODUCTS[product](a, twin)), shape
            assert_same(t, twin, f"{shape}, after it was read")


def test_the_example_of_a_projection():
    """t = weight.new_zeros(4, 64); t.copy_(v); a @ t.t()"""
    v, a = weight(4, 64, seed=5), weight(5, 64, seed=6)
    for fmt in FORMATS:
        for keep_master in (True, False):
            t = make(fmt, keep_master).new_zeros(4, 64)
            t.copy_(v)
            error = ((a @ t.t()) - a @ v.t()).norm() / (a @ v.t()).norm()
            assert error == 0, f"{fmt}: off by {error:.1%}"
            assert_same(t, v, f"{fmt}, after it was read")


# ---------------------------------------------------------------------- who makes them


class Lora(nn.Module):
    """As loralib does: adapters made by the base weight's new_zeros, then filled."""

    def __init__(self, base, make_zeros, r=4):
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.a = nn.Parameter(make_zeros(base, (r, base.shape[1])))
        self.b = nn.Parameter(make_zeros(base, (base.shape[0], r)))
        with torch.no_grad():
            self.a.copy_(weight(r, base.shape[1], seed=9) / 8)

    def forward(self, x):
        return F.linear(x, self.base) + F.linear(F.linear(x, self.a), self.b)


def losses_of(model, steps=30):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, model.base.shape[1], generator=generator)
        loss = (model(x) - x.roll(1, 1)[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@keep_or_not
@formats
def test_adapters_train_as_plain_ones(fmt, keep_master):
    base = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) / 8
    bases = [ops.quantize(base, fmt, keep_master=keep_master) for _ in range(2)]
    ours = Lora(bases[0], lambda w, shape: w.new_zeros(shape))
    plain = Lora(bases[1], lambda w, shape: torch.zeros(shape))
    a, b = losses_of(ours), losses_of(plain)
    assert a == b, f"{a[-1]:.4g}, of plain ones {b[-1]:.4g}"


def attended(query, memory):
    return F.softmax(query @ memory.t() / 8, -1) @ memory


@keep_or_not
@formats
def test_a_memory_filled_token_by_token(fmt, keep_master):
    w = make(fmt, keep_master)
    cache, plain = w.new_zeros(16, COLS), torch.zeros(16, COLS)
    for i, token in enumerate(weight(16, COLS, seed=3)):
        for memory in (cache, plain):
            memory[i] = token
        query = weight(3, COLS, seed=i)
        ours, expected = (attended(query, m[: i + 1]) for m in (cache, plain))
        error = (ours - expected).norm() / expected.norm()
        assert error == 0, f"token {i}: off by {error:.1%}"
        assert_same(cache, plain)


@keep_or_not
@formats
def test_a_preconditioner_of_an_optimizer(fmt, keep_master):
    """As Shampoo and SOAP keep: p.new_zeros(n, n), a mean of outer products of gradients."""
    w = make(fmt, keep_master)
    for n in (COLS, w.shape[0]):
        ours, plain = w.new_zeros(n, n), torch.zeros(n, n)
        for step in range(3):
            grad = weight(n, 8, seed=step)
            for matrix in (ours, plain):
                matrix.lerp_(grad @ grad.t(), 0.1)
            assert_same(ours @ grad, plain @ grad, f"{n}, step {step}")
            assert_same(ours, plain)
        assert_same(torch.linalg.eigvalsh(ours), torch.linalg.eigvalsh(plain))


@keep_or_not
@formats
def test_a_momentum_made_by_the_parameter(fmt, keep_master):
    w = make(fmt, keep_master)
    momenta = {"new_zeros": w.new_zeros(w.shape), "zeros_like": torch.zeros_like(w)}
    for name, momentum in momenta.items():
        twin = torch.zeros(w.shape)
        for step in range(3):
            grad = weight(*w.shape, seed=step)
            for m in (momentum, twin):
                m.mul_(0.9).add_(grad)
            assert_same(momentum @ grad.t(), twin @ grad.t(), name)
        assert_same(momentum, twin, name)


# ----------------------------------------------------------------- what reads a plain one


def filled(fmt, keep_master, shape=(8, COLS)):
    t = make(fmt, keep_master).new_zeros(shape)
    return t.copy_(plain_like(shape)), plain_like(shape)


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "dlpack": torch.from_dlpack,
    "tolist": lambda t: torch.tensor(t.tolist()),
    "to": lambda t: t.to(torch.float32, copy=True),
    "parameter": lambda t: nn.Parameter(t).detach(),
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(-1).view(t.shape),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, t.shape),
    "cat": lambda t: torch.cat([t[:3], t[3:]]),
    "compiled": lambda t: torch.compile(lambda x: x * 1, backend="aot_eager")(t),
    "state_dict": lambda t: state_dict_of(t)["p"],
}


def state_dict_of(t):
    module = nn.Module()
    module.p = nn.Parameter(t)
    return module.state_dict()


@pytest.mark.parametrize("name", COPIES)
@keep_or_not
@formats
def test_a_copy_of_it_is_plain(fmt, keep_master, name):
    t, values = filled(fmt, keep_master)
    a = weight(5, COLS, seed=6)
    assert_same(COPIES[name](t), values)
    assert torch.equal(a @ COPIES[name](t).t(), a @ values.t())
    assert_same(t, values, "after it was read")


@keep_or_not
@formats
def test_its_memory_is_its_value(fmt, keep_master):
    t, values = filled(fmt, keep_master)
    assert t.data_ptr() != 0
    t.numpy()[2] = 7
    values[2] = 7
    assert_same(t, values)
    a = weight(5, COLS, seed=6)
    assert torch.equal(a @ t.t(), a @ values.t())


# --------------------------------------------------------------- of rows and of plain ones

ORDERS = {
    "rows first": lambda t, w, v: (t[:32].copy_(w[:32]), t[32:].copy_(v[32:])),
    "plain first": lambda t, w, v: (t[32:].copy_(v[32:]), t[:32].copy_(w[:32])),
    "rows in the middle": lambda t, w, v: (
        t[32:64].copy_(w[32:64]),
        t[:32].copy_(v[:32]),
        t[64:].copy_(w[64:]),
    ),
    "rows of elsewhere": lambda t, w, v: (t[:32].copy_(w[32:64]), t[32:].copy_(v[32:])),
    "rows, rows": lambda t, w, v: (t[:32].copy_(w[:32]), t[32:].copy_(w[32:])),
    "rows, columns": lambda t, w, v: (t.copy_(w), t[:, 5:9].copy_(v[:, 5:9])),
    "row by row": lambda t, w, v: [t[i].copy_((w, v)[i % 2][i]) for i in range(len(t))],
    "added": lambda t, w, v: (t.copy_(w), t[:32].add_(v[:32])),
    "zeroed, rows": lambda t, w, v: (t.zero_(), t[:32].copy_(w[:32])),
    "last rows": lambda t, w, v: (t[64:].copy_(w[64:]), t[:64].copy_(v[:64])),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("new", ["new_zeros", "new_empty"])
@keep_or_not
@formats
def test_some_rows_are_quantized_and_some_plain(fmt, keep_master, new, order):
    """A cache, a merge of two models: the values, and a product of them or of their codes."""
    w, v = make(fmt, keep_master), weight(ROWS, COLS, seed=4)
    t, twin = NEW[new](w, w.shape), torch.zeros(w.shape)
    ORDERS[order](t, w, v)
    ORDERS[order](twin, value(w), v)
    assert_same(t, twin)
    a = weight(5, COLS, seed=6)
    got, plain = a @ t.t(), a @ twin.t()
    if not torch.equal(got, plain):
        assert is_quantized(t)
        if fmt == "float8_delayed":
            return  # by amaxes of earlier steps
        codes = ops.dequantize(quantized_alike(twin, t, keep_master))
        error = (got - a @ codes.t()).norm() / plain.norm()
        bound = 0.3 if info_of(fmt).code_bits == 4 and not keep_master else 0.01
        assert error < bound, f"{error:.1%}"


@formats
def test_looking_for_an_attribute_changes_nothing(fmt):
    for keep_master in (True, False):
        t, values = filled(fmt, keep_master, (ROWS, COLS))
        before = is_quantized(t), torch._C._dispatch_keys(t).raw_repr()
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather", "__get_tensor_shard__"):
            hasattr(t, name)
        repr(t), t.shape, t.is_contiguous()
        assert before == (is_quantized(t), torch._C._dispatch_keys(t).raw_repr())
        a = weight(5, COLS, seed=6)
        assert torch.equal(a @ t.t(), a @ values.t())
