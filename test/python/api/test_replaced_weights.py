"""Plain parameters that code writes into `module._parameters` in the place of quantized ones: each module, whatever its
class, tells of them by its name at its next use, and qshard.report lists them."""

import copy
import pickle
import warnings

import pytest
import torch
from dist_helpers import on_ranks
from models.own_forwards import CLASSES, NAMES, plain, quantize, write_plain
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import qshard
from qshard import module_state

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
WRITTEN = "was quantized, and a plain parameter was put in its place"


def said_by(run):
    """What warnings say of replaced parameters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if WRITTEN in str(w.message) or "plain parameter, which" in str(w.message)]


@pytest.mark.parametrize("index", range(5), ids=[cls.__name__ for cls in CLASSES])
def test_each_module_tells_once_and_by_its_name(index):
    model = quantize(plain())
    assert not said_by(lambda: model(X))
    module, name = model[index], NAMES[index]
    write_plain([module], name)
    (said,) = said_by(lambda: (model(X), model(X)))
    assert f"qshard: {index}.{name} of a {type(module).__name__} {WRITTEN}" in said
    assert ("which is quantized at each use" if index < 2 else "which the forward reads as it is") in said
    line = f"plain: {index}.{name}, quantized before; call qshard.quantize_(model, recipe) again"
    assert line in qshard.report(model).clients
    quantize(model)
    assert qshard.is_quantized(module._parameters[name]) and line not in qshard.report(model).clients
    write_plain([module], name)
    assert len(said_by(lambda: model(X))) == 1


def test_written_weights_of_linears_are_quantized_at_each_use():
    model, twin = quantize(plain()), quantize(plain())
    weight = torch.randn(32, 32)
    for index in (0, 1):
        model[index]._parameters["weight"] = nn.Parameter(weight.clone())
        with torch.no_grad():
            twin[index].weight.copy_(weight)
    outputs = []
    for each in (model, twin):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs.append(each[:2](X))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    assert all(torch.equal(model[i].weight.grad, twin[i].weight.grad) for i in (0, 1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_tell_by_their_class(copied):
    model = copied(quantize(plain()))
    write_plain(model, "experts")
    (said,) = said_by(lambda: model(X))
    assert f"qshard: the experts of this Stack {WRITTEN}" in said


def test_what_is_given_for_one_call_is_not_told_of():
    model = quantize(plain())
    given = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    assert not said_by(lambda: functional_call(model, given, X))
    assert not said_by(lambda: model(X))


def test_fx_traces_linears():
    """With proxies in the place of weights."""
    model = quantize(plain())[:2]
    assert torch.equal(torch.fx.symbolic_trace(model)(X), model(X))


def test_compiled_code_tells_when_it_is_traced():
    torch._dynamo.reset()
    model = quantize(plain())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert not said_by(lambda: compiled(X))
    write_plain(model, "experts")
    write_plain(model, "matrix")
    said = said_by(lambda: (compiled(X), compiled(X)))
    assert [message.split(" of a ")[0] for message in said] == ["qshard: 3.experts", "qshard: 4.matrix"]


@pytest.mark.parametrize("is_first", [True, False], ids=["quantize, shard", "shard, quantize"])
@on_ranks(2, devices=("cpu",))
def test_gathered_weights_are_not_told_of(is_first):
    model = plain()
    if is_first:
        quantize(model)
    for module in (*model, model):
        fully_shard(module)
    if not is_first:
        quantize(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert not said_by(train)
    assert not any(line.startswith("plain") for line in qshard.report(model).clients)


def test_dequantize_leaves_nothing_in_modules_whose_weights_were_replaced():
    model = quantize(plain())
    for name in {*NAMES}:
        write_plain(model, name)
    said_by(lambda: model(X))
    qshard.dequantize_(model)
    assert tuple(map(type, model)) == CLASSES
    for module in model:
        assert not {module_state.NAME, "extra_repr"} & module.__dict__.keys()
        assert not any(value for name, value in module.__dict__.items() if "hooks" in name)
