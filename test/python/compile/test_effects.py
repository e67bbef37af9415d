"""Operators that change what no schema declares: compilers keep them, in their order, after the writes
before them."""

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from helpers import assert_same, bits, ops, value, weight
from torch._higher_order_ops.effects import _get_effect
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import qshard
from qshard._runtime.classes import TensorState

BUDGET_S = 60  # Inductor's first compilation


# What returns a value, and is more than that.
EFFECTS_WITH_A_VALUE = {"_pre_all_gather", "_gather_over_mesh", "_post_all_gather"}


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch._dynamo.reset()
    return torch.device(request.param)


def parameter(device, keep_master=True):
    return ops.quantize(weight(64, 48).to(device), "float8_blockwise", keep_master=keep_master)


def is_written(q):
    return bool(TensorState(q.detach()).pack()[2][6])


def counts(function, *args):
    """The result of a call, and how often it ran each operator."""
    with torch.profiler.profile() as profile:
        result = function(*args)
    return result, {event.key: event.count for event in profile.key_averages()}


# ---------------------------------------------------------------------------------- declared


def schemas():
    return [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("qshard::")]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.name.split("::")[1])
def test_each_operator_has_a_result_or_declares_what_it_does(schema):
    name = schema.name.split("::")[1]
    is_effect = _get_effect(schema.name) is not None
    if schema.is_mutable:
        assert not is_effect  # a compiler orders it by what it writes
    elif not schema.returns:
        assert is_effect, "compilers remove what returns nothing and writes nothing"
    else:
        assert is_effect == (name in EFFECTS_WITH_A_VALUE)
        assert is_effect or not name.startswith(
            ("_set", "_keep_g", "_mark", "_share_t", "flush", "_flush", "_refresh")
        )


# ------------------------------------------------------------------------------------ traced


def flush_mark_flush(x, w):
    ops.flush([w])
    ops._mark_written(w)
    ops.flush([w])
    return x + 1


ORDER = [ops.flush.default, ops._mark_written.default, ops.flush.default]


def traced_with_aot(x, w):
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    result = aot_function(flush_mark_flush, compiler)(x, w)
    return graphs[0], result


def test_effects_stay_in_a_graph_in_their_order():
    x, w = torch.ones(3), parameter("cpu")
    graph, result = traced_with_aot(x, w)
    effects = [n for n in graph.graph.nodes if n.target is torch.ops.higher_order.with_effects]
    assert [node.args[1] for node in effects] == ORDER
    for node, after in zip(effects, effects[1:]):  # each takes the token of the one before
        assert after.args[0].args[0] is node
    assert torch.equal(result, x + 1) and not is_written(w)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_effects_are_no_dead_code(mode):
    graph = make_fx(flush_mark_flush, tracing_mode=mode)(torch.ones(3), parameter("cpu"))
    graph.graph.eliminate_dead_code()
    assert [n.target for n in graph.graph.nodes if "qshard" in str(n.target)] == ORDER


def test_inductor_runs_effects(device):
    x, w = torch.ones(3, device=device), parameter(device)
    ops._mark_written(w)
    graph = make_fx(flush_mark_flush)(x, w)
    compiled = torch._inductor.compile(graph, [x, w])
    compiled(x, w)
    result, ran = counts(compiled, x, w)
    assert torch.equal(result[0] if isinstance(result, (list, tuple)) else result, x + 1)
    assert (ran["qshard::flush"], ran["qshard::_mark_written"]) == (2, 1)
    assert "aten::clone" not in ran and "aten::copy_" not in ran
    assert not is_written(w)


def test_a_flush_of_what_the_graph_writes_is_refused_by_name():
    """The write would reach the weight when the graph ends."""
    w = parameter("cpu")
    before = value(w)

    def write_and_flush(x, w):
        w.mul_(2)
        ops.flush([w])
        return x + 1

    with pytest.raises(Exception, match="flush: the traced code wrote this tensor"):
        aot_function(write_and_flush, lambda graph, _: make_boxed_func(graph.forward))(torch.ones(3), w)
    assert_same(w, before)


def test_operators_with_effects_take_fakes():
    w = parameter("cpu")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(w)
        assert ops.flush([fake]) is None and ops._mark_written(fake) is None
        with pytest.raises(Exception, match="_pre_all_gather: a gather is not traced"):
            ops._pre_all_gather(fake, "")
        with pytest.raises(Exception, match="_refresh_gathered: a gather is not traced"):
            ops._refresh_gathered(fake, torch.empty(3, device="meta"), torch.empty(3))
    assert not is_written(w)


# ---------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
# Inductor writes through the address, which a tensor without a master does not have.
@pytest.mark.only_where(lambda backend, keep_master: backend != "inductor" or keep_master)
def test_compiled_code_writes_flushes_and_reads_codes(device, backend, keep_master):
    w, eager = parameter(device, keep_master), parameter(device, keep_master)
    x = weight(8, 48, seed=1).to(device)

    def step(w, x):
        w.mul_(2)
        ops.flush([w])
        return ops.linear(x, w)

    compiled = torch.compile(step, backend=backend)
    compiled(w, x)
    step(eager, x)
    y, ran = counts(compiled, w, x)
    expected, ran_eagerly = counts(step, eager, x)
    assert torch.equal(y, expected)
    assert torch.equal(bits(ops.codes(w)), bits(ops.codes(eager)))
    assert_same(w, eager)
    assert not is_written(w)
    assert ran["qshard::flush"] == ran_eagerly["qshard::flush"] == 1
    assert ran.get("aten::clone", 0) == ran_eagerly.get("aten::clone", 0)
    if backend != "aot_eager":  # which copies what it computed into the weight
        assert ran.get("aten::copy_", 0) <= ran_eagerly.get("aten::copy_", 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_flushes_a_model(device, backend):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 32)).to(device)
        models.append(qshard.quantize_(layers, qshard.Float8BlockScaling()))
    x = weight(8, 48, seed=1).to(device)

    def step(model, x):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        qshard.flush(model)
        return model(x)

    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        y, ran = counts(compiled, models[0], x)
        torch.testing.assert_close(y, step(models[1], x), rtol=1e-5, atol=1e-5)
    assert ran["qshard::flush"] == 1
    for a, b in zip(*(model.parameters() for model in models)):
        assert_same(a, b)
    assert not any(is_written(layer.weight) for layer in models[0])


@pytest.mark.parametrize("what", ["operator", "function"])
def test_fullgraph_says_what_runs_between_graphs(what):
    torch._dynamo.reset()
    model = qshard.quantize_(torch.nn.Sequential(torch.nn.Linear(48, 64)), qshard.Float8BlockScaling())

    def step(x):
        if what == "operator":
            ops.flush([model[0].weight])
        else:
            qshard.flush(model)
        return x + 1

    with pytest.raises(Exception, match=r"qshard\.flush") as caught:
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(3))
    errors, error = [], caught.value
    while error is not None:
        errors.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("with fullgraph=True call it outside the compiled function" in text for text in errors)
