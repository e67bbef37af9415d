"""Experts of transformers' models: each way that it computes them multiplies by the codes of a quantized stack."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from collective_calls import gathers
from dist_helpers import on_ranks
from helpers import assert_same, is_quantized, ops, row_bytes
from torch.utils._python_dispatch import TorchDispatchMode

import qshard

pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5.0")
import qshard.integrations.transformers  # noqa: E402, F401 registers experts_implementation="qshard"
from moe_models import MODELS, make_model, tokens  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

BUDGET_S = 240  # Inductor's first compilation takes 30 s

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "qshard")


@contextlib.contextmanager
def in_one_order():
    """batched_mm reads an expert several times: threads add their gradients up in any order, else."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def quantize_stacks(model, format, keep_master=True, stacks="_proj"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trained weights without a master
        qshard.quantize_(
            model,
            format,
            filter_fn=lambda *_: False,
            parameter_fn=lambda parameter, name: parameter.dim() == 3 and name.endswith(stacks),
            keep_master=keep_master,
        )
    return model


def twin_of(model, name, implementation):
    """A plain model whose experts hold what the codes stand for."""
    twin = make_model(name, implementation)
    values = {
        key: ops.dequantize(p) if is_quantized(p) else p.detach()
        for key, p in model.named_parameters()
    }
    twin.load_state_dict(values, strict=False)
    return twin


@pytest.mark.pairwise
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_multiply_codes(name, format, keep_master, implementation):
    model = quantize_stacks(make_model(name, implementation), format, keep_master)
    stacks = [p for p in model.parameters() if is_quantized(p)]
    assert len(stacks) == MODELS[name][2]
    twin = twin_of(model, name, implementation)
    ids = tokens(1)
    logits, expected = model(ids).logits, twin(ids).logits
    assert_same(logits, expected)
    with in_one_order():
        logits.square().mean().backward()
        expected.square().mean().backward()
    gradients = {key: p.grad for key, p in twin.named_parameters()}
    for key, p in model.named_parameters():
        if p.grad is not None or gradients[key] is not None:
            assert_same(p.grad, gradients[key], key)
    with torch.no_grad():
        settings = {"max_new_tokens": 4, "do_sample": False}
        assert_same(model.generate(ids, **settings), twin.generate(ids, **settings))


def values_and_gradients(model, ids, call=None):
    with in_one_order():
        logits = (model if call is None else call)(ids).logits
        logits.square().mean().backward()
    return logits.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_implementations_agree(name):
    found = {}
    for implementation in IMPLEMENTATIONS:
        model = quantize_stacks(make_model(name, implementation), "float8_blockwise")
        found[implementation] = values_and_gradients(model, tokens(1))
    for logits, gradients in found.values():
        torch.testing.assert_close(logits, found["eager"][0])
        torch.testing.assert_close(gradients, found["eager"][1])


@pytest.mark.parametrize("name", MODELS)
def test_plain_experts_are_those_of_grouped_mm(name):
    for is_one_quantized in (False, True):  # torch's grouped_mm multiplies by the other of two
        model = make_model(name, "qshard")
        if is_one_quantized:
            quantize_stacks(model, "nvfp4", stacks="down_proj")
        twin = twin_of(model, name, "grouped_mm")
        found, expected = (values_and_gradients(m, tokens(2)) for m in (model, twin))
        assert_same(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])


def experts_of(name, format="float8_blockwise", dtype=None):
    """The experts of a model's last layer, as they are and with the codes' values."""
    model = make_model(name, "qshard").to(dtype)
    for p in model.parameters():  # gpt-oss begins with biases of zeros
        p.data.normal_(std=0.1)
    model = quantize_stacks(model, format)
    return model.model.layers[-1].mlp.experts


def routes(experts, tokens=6, top_k=3, highest=None):
    generator = torch.Generator().manual_seed(tokens)
    highest = experts.num_experts if highest is None else highest
    ids = torch.rand(tokens, highest, generator=generator).argsort(1)[:, :top_k]
    hidden = torch.randn(tokens, 64, generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    return hidden.requires_grad_(), ids, weights.requires_grad_()


def by_linears(experts, hidden, ids, weights):
    """One token and expert after the other, which transformers' eager experts do for one number behind the last."""
    first, last = (experts.gate_up_proj, experts.down_proj)
    biases = [getattr(experts, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
    rows = [hidden[:0]]
    for t in range(len(ids)):
        total = torch.zeros_like(hidden[t])
        for slot, e in enumerate(ids[t].tolist()):
            if e >= experts.num_experts:
                continue
            x = hidden[t : t + 1]
            for weight, bias in zip((first, last), biases):
                x = x @ weight[e] if experts.is_transposed else F.linear(x, weight[e])
                x = x if bias is None else x + bias[e]
                x = experts._apply_gate(x) if weight is first else x
            total = total + x[0] * weights[t, slot]
        rows.append(total[None])
    return torch.cat(rows)


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize("name", MODELS)
def test_experts_of_other_ranks_add_nothing(name, tokens):
    """Expert parallelism gives the experts of other ranks numbers behind the last one of this rank."""
    experts = experts_of(name)
    inputs = routes(experts, tokens, highest=2 * experts.num_experts)
    found = [experts(*inputs), by_linears(experts, *inputs)]
    gradients = []
    for output in found:
        output.square().sum().backward()
        trained = (*experts.parameters(), inputs[0], inputs[2])
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in trained])
        for p in trained:
            p.grad = None
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients)


def test_a_nan_stays_in_its_expert():
    """Bias gradients are sums of an expert's rows alone."""
    experts = experts_of("gpt_oss")
    hidden, ids, weights = routes(experts, 6, top_k=1)
    ids[:] = torch.tensor([[0], [1], [2], [1], [0], [3]])
    output = experts(hidden, ids, weights)
    grad = torch.ones_like(output)
    grad[5] = float("nan")
    output.backward(grad)
    for name, p in experts.named_parameters():
        assert p.grad[3].isnan().any() and not p.grad[:3].isnan().any(), name


def test_biases_add_up_in_fp32():
    experts = experts_of("gpt_oss", dtype=torch.bfloat16)
    rows = 1000  # in bfloat16 a sum of ones stays at 256
    weights = torch.ones(rows, 1, dtype=torch.bfloat16)
    output = experts(torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(rows, 1, dtype=torch.long), weights)
    output.backward(torch.ones_like(output))
    assert_same(experts.down_proj_bias.grad[0], torch.full((64,), 1000.0).bfloat16())


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_the_host_asks_the_device_for_nothing(name):
    experts = experts_of(name)
    with Seen() as seen:
        experts(*routes(experts)).sum().backward()
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "bincount", "is_nonzero", "equal"}
    assert {"qshard::linear_forward", "qshard::linear_backward"} <= seen.names
    assert not {f"aten::{wait}" for wait in waits} & seen.names


# A bfloat16 model differs by Inductor, which leaves out roundings between operators that it fuses
# (emulate_precision_casts of https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/config.py).
@pytest.mark.parametrize("weights, backend", [
    ("quantized", "aot_eager"),
    pytest.param("quantized", "inductor", marks=pytest.mark.takes_a_minute),
    ("plain", "aot_eager"),
])
@pytest.mark.parametrize("name", MODELS)
def test_models_compile_as_one_graph(name, weights, backend):
    torch._dynamo.reset()
    dtype = torch.float32 if weights == "quantized" else torch.bfloat16
    models = [make_model(name, "qshard").to(dtype) for _ in range(2)]
    if weights == "quantized":
        models = [quantize_stacks(model, "float8_blockwise") for model in models]
    compiled = torch.compile(models[1], fullgraph=True, backend=backend)
    ids = torch.randint(1, 64, (2, 8))
    expected, found = values_and_gradients(models[0], ids), values_and_gradients(models[1], ids, compiled)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.takes_a_minute
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_compile_by_inductor(name):
    torch._dynamo.reset()
    experts = experts_of(name)
    hidden, ids, weights = routes(experts)
    found = []
    for call in (experts, torch.compile(experts, fullgraph=True)):
        output = call(hidden, ids, weights)
        output.square().sum().backward()
        trained = (hidden, weights, *experts.parameters())
        found.append([output.detach(), *(p.grad for p in trained)])
        for p in trained:
            p.grad = None
    torch.testing.assert_close(*found)


def test_quantize_registers_the_implementation(monkeypatch):
    """A user may never have imported qshard.integrations.transformers."""
    model = make_model("mixtral", "grouped_mm")
    monkeypatch.delitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "qshard")
    with pytest.raises(ValueError, match="is not supported"):
        model.set_experts_implementation("qshard")
    quantize_stacks(model, "mxfp8")
    expected = model(tokens(1)).logits
    model.set_experts_implementation("qshard")
    assert_same(model(tokens(1)).logits, expected)


def bytes_of_shards(parameters, format):
    """What a rank of two puts into the gather of a unit, from shapes alone."""
    total = 0
    for p in parameters:
        rows, rest = -(-p.shape[0] // 2), p.shape[1:]
        if is_quantized(p):
            total += rows * rest[0] * row_bytes(format, rest[1])
        else:
            total += rows * rest.numel() * p.element_size()
    return total


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, devices=("cpu",))
def test_experts_under_fsdp2(name, implementation):
    from torch.distributed.fsdp import fully_shard

    model, sharded = (
        quantize_stacks(make_model(name, implementation), "float8_blockwise", True)
        for _ in range(2)
    )
    expected = {bytes_of_shards(layer.parameters(), "float8_blockwise") for layer in model.model.layers}
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, sharded)]
    for step in range(3):
        with gathers(lambda input: input.nbytes) as gathered:
            logits = [m(tokens(step)).logits for m in (model, sharded)]
        assert expected <= set(gathered)
        assert_same(logits[1], logits[0], f"step {step}")
        for output, optimizer in zip(logits, optimizers):
            with in_one_order():
                output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    settings = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        assert_same(sharded.generate(tokens(3), **settings), model.generate(tokens(3), **settings))
