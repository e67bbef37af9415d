"""Which norms fuse_ finds to feed linears alone, by the source of forwards, and which it leaves."""

import pytest
import torch
from nn_helpers import RECIPES, assert_bits, randomize
from test_fuse import MLP, TwiceRounded
from test_fuse_norms import SIZE, Counted, input_of
from torch import nn

import qshard


class Calls(nn.Module):
    """A module with norms, linears, and another that has linears; its forward is one of those below."""

    def __init__(self, reads):
        super().__init__()
        self.norm, self.head, self.more = TwiceRounded(SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.reads = reads


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x, scale=1):
        return self.first(x) * scale + self.second(x)


class Found:
    """Forwards that call the norm once, for linears alone."""

    def nested(self, x): return x + self.reads(self.norm(x), 2)
    def by_name(self, x): return x + self.reads(scale=2, x=self.norm(x))
    def own(self, x): return self.head(self.norm(x))
    def changed_later(self, x):
        y = self.norm(x)
        y, z = self.reads(y), x.shape
        return y.view(z)
    def asked(self, x):
        y = self.norm(x)
        rows = y.shape[0], y.size(1)
        return self.reads(y).view(*rows, -1)
    def own_linears(self, x):
        normed = self.norm(x)
        norm = self.head(normed).view(normed.shape)  # a local variable of the norm's name
        return norm * self.more(normed)
    def written_in_place_after(self, x):
        y = self.norm(x.clone())
        x = x.mul(2)
        return self.reads(y, 3) + x


class NotFound:
    """Forwards in which something else may use what the norm gives, or the code is not plain."""

    def returned(self, x):
        y = self.norm(x)
        return self.reads(y) + y
    def asked_more(self, x):
        y = self.norm(x)
        return self.reads(y).view(y.view(x.shape).shape)
    def twice(self, x): return self.reads(self.norm(x)) + self.norm(x)
    def in_a_branch(self, x):
        y = self.norm(x) if self.training else x
        return self.reads(y)
    def read_in_a_branch(self, x):
        y = self.norm(x)
        if self.training:
            return self.reads(y)
        return x
    def in_a_loop(self, x):
        y = self.norm(x)
        for _ in range(2):
            x = x + self.reads(y)
        return x
    def in_a_context(self, x):
        y = self.norm(x)
        with torch.no_grad():
            return self.reads(y)
    def in_a_list(self, x): return sum([self.reads(y) for y in [self.norm(x)]])
    def in_a_function(self, x):
        y = self.norm(x)
        return (lambda: self.reads(y))()
    def captured(self, x):
        y = self.norm(x)
        later = lambda: y  # noqa: E731
        return self.reads(y) + later()
    def captured_before(self, x):
        y = x
        later = lambda: y  # noqa: E731
        y = self.norm(x)
        return self.reads(y) + later()
    def written_within(self, x):
        y = self.norm(x)
        return (y := x) + self.reads(y)
    def written_in_a_branch(self, x):
        y = self.norm(x)
        if self.training:
            y = x
        return self.reads(y)
    def written_in_a_loop(self, x):
        y = self.norm(x)
        for y in (y, x):
            pass
        return self.reads(y)
    def scaled(self, x): return self.reads(self.norm(x) * 2)
    def unpacked(self, x): return self.reads(*[self.norm(x)])
    def unpacked_names(self, x): return self.reads(**{"x": self.norm(x)})
    def doubled(self, x):
        y = z = self.norm(x)
        return self.reads(y) + z
    def added_to(self, x):
        y = self.norm(x)
        y += 1
        return self.reads(y)
    def named(self, x): return self.reads(y := self.norm(x)) + y
    def two_readers(self, x):
        y = self.norm(x)
        return self.reads(y) + self.head(y)
    def of_other_use(self, x): return self.reads(self.norm(x)) + self.norm.weight
    def by_another_name(self, x):
        reads = self.reads
        return reads(self.norm(x))
    def of_another(self, x):
        self, = (self,)
        return self.reads(self.norm(x))
    def kept(self, x):
        self.y = self.norm(x)
        return self.reads(self.y)


class Read:
    """Forwards of what the norm is given to, which it goes into."""

    def asked(self, x, scale=1):
        rows, _ = x.size(0), x.dim()
        for _ in range(x.ndim):
            scale = scale * rows / rows
        return (self.first(x) + self.second(x).to(x.dtype)).view(x.shape) * scale
    def one(self, x, /): return self.second(self.first(x).relu())


class NotRead:
    """And those that it does not go into."""

    def otherwise(self, x): return self.first(x) + x
    def twice(self, x): return self.first(x) + self.first(x)
    def as_weight(self, x): return nn.functional.linear(x, self.first.weight)
    def in_a_branch(self, x): return self.first(x) if x.shape[0] else self.second(x)
    def in_a_list(self, x): return sum(linear(x) for linear in (self.first, self.second))
    def in_a_loop(self, x):
        for _ in range(2):
            y = self.first(x)
        return y
    def changed(self, x):
        x = x * 2
        return self.first(x)
    def captured(self, x):
        later = lambda: x  # noqa: E731
        return self.first(x) + later()
    def changed_between(self, x):
        y = self.first(x)
        x = y * 2
        return self.second(x)
    def with_more(self, x): return self.first(x, None)
    def any_arguments(self, *args): return self.first(args[0])
    def in_a_context(self, x):
        with torch.no_grad():
            return self.first(x)
    def asked_more(self, x): return self.first(x).to(x.grad_fn is None and x.dtype)
    def other_linears(self, x): return self.first.forward(x)
    @torch.no_grad()
    def decorated(self, x): return self.first(x)


def forwards(kind):
    return {name: function for name, function in vars(kind).items() if not name.startswith("__")}


def made(forward=Found.nested, read=Reads.forward):
    reads = type("Reader", (Reads,), {"forward": read})()
    model = randomize(type("Caller", (Calls,), {"forward": forward})(reads))
    return qshard.quantize_(model, RECIPES["float8_blockwise"])


def found_in(model):
    """Patterns of norms and linears, and how often a forward has used one; its values are checked."""
    x = input_of()
    qshard.fuse_(model.norm)
    expected = model(x)
    report = [row.pattern for row in qshard.fuse_(model)]
    with Counted() as counted:
        y = model(x)
        assert_bits(y, expected)
    if y.requires_grad:
        y.sum().backward()
    return report, counted.count


@pytest.mark.parametrize("name", forwards(Found))
def test_found(name):
    report, count = found_in(made(forwards(Found)[name]))
    expected = {"own": "norm into head", "own_linears": "norm into head, more"}
    assert report == [expected.get(name, "norm into reads.first, second")] and count == 1


@pytest.mark.parametrize("name", forwards(NotFound))
def test_not_found(name):
    model = made(forwards(NotFound)[name])
    kinds = [type(m) for m in model.modules()]
    assert found_in(model) == ([], 0)
    assert [type(m) for m in model.modules() if m is not model.norm] == [k for k in kinds if k is not TwiceRounded]


@pytest.mark.parametrize("name", forwards(Read))
def test_read(name):
    def forward(self, x):
        return x + self.reads(self.norm(x))

    expected = {"one": "norm into reads.first"}
    report, count = found_in(made(forward, forwards(Read)[name]))
    assert report == [expected.get(name, "norm into reads.first, second")] and count == 1


@pytest.mark.parametrize("name", forwards(NotRead))
def test_not_read(name):
    def forward(self, x):
        return x + self.reads(self.norm(x))

    assert found_in(made(forward, forwards(NotRead)[name])) == ([], 0)


def test_without_source():
    known = {}
    exec("def forward(self, x): return x + self.reads(self.norm(x))", known)
    assert found_in(made(known["forward"])) == ([], 0)


def test_arguments_have_the_names_that_they_had():
    torch.manual_seed(0)
    norm, mlp = TwiceRounded(32), MLP()
    x = torch.randn(7, 32)
    expected = mlp(norm(hidden_states=x))
    for module in (norm, mlp):
        qshard.fuse_(module)
    assert_bits(mlp(x=norm(hidden_states=x)), mlp(norm(x)))
    torch.testing.assert_close(mlp(norm(x)), expected, rtol=1e-5, atol=1e-5)
    for module in (norm, mlp):
        with pytest.raises(TypeError):
            module(other=x)
    compiled = torch.compile(lambda x: mlp(x=norm(hidden_states=x)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
