"""What modules return is memory of their own: a parameter may be freed when its module's call has ended, as
FSDP2 and FSDP1 do with one that they gathered."""

import pytest
import torch
from dist_helpers import device, full_mesh, on_ranks
from nn_helpers import assert_bits, gradients, on_devices, randomize
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import qshard
from qshard import nn

BUDGET_S = 60
HIDDEN = 64
LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd", "num_gqa_groups": 2}
MODULES = {
    "Linear": lambda **more: nn.Linear(HIDDEN, 48, return_bias=True, **more),
    "Linear of parts": lambda **more: nn.Linear(
        HIDDEN, 48, return_bias=True, parameters_split=("a", "b"), **more),
    "LayerNormLinear": lambda **more: nn.LayerNormLinear(
        HIDDEN, 48, return_bias=True, return_layernorm_output=True, **more),
    "LayerNormMLP": lambda **more: nn.LayerNormMLP(
        HIDDEN, 96, return_bias=True, return_layernorm_output=True, **more),
    "LayerNormMLP, checkpoint": lambda **more: nn.LayerNormMLP(
        HIDDEN, 96, return_bias=True, checkpoint=True, **more),
    "MultiheadAttention": lambda **more: nn.MultiheadAttention(
        HIDDEN, 4, return_bias=True, input_layernorm=True, attention_dropout=0.0, **more),
    "LayerNorm": lambda **more: nn.LayerNorm(HIDDEN, **more),
    "RMSNorm": lambda **more: nn.RMSNorm(HIDDEN, **more),
    "TransformerLayer": lambda **more: nn.TransformerLayer(HIDDEN, 96, 4, **LAYER, **more),
}


def memory(tensor):
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata, local.data_ptr()


def results_of(module, x):
    results = module(x)
    return results if isinstance(results, tuple) else (results,)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_no_result_is_a_parameter(kind, dtype, device):
    module = randomize(MODULES[kind](device=device, params_dtype=dtype))
    x = torch.randn(4, 2, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    parameters = {memory(p)[0] for p in module.parameters()}
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            assert not parameters.intersection(memory(result)[0] for result in results_of(module, x))


@pytest.mark.parametrize("kind", ["Linear", "Linear of parts", "LayerNormLinear", "LayerNormMLP"])
def test_a_returned_bias_has_its_gradient_and_value(kind):
    module = randomize(MODULES[kind]())
    names = [name for name, _ in module.named_parameters() if name.endswith("bias")]
    names = [name for name in names if not name.startswith(("layer_norm", "fc1"))]
    bias = results_of(module, torch.randn(4, 2, HIDDEN))[1]
    biases = [module.get_parameter(name) for name in names]
    assert_bits(bias, torch.cat([b.detach() for b in biases]))
    weights = torch.arange(1.0, bias.numel() + 1)
    (bias * weights).sum().backward()
    assert_bits(torch.cat([b.grad for b in biases]), weights)


# --------------------------------------------------------------------------------- sharded modules


class WithBias(torch.nn.Module):
    """A module that returns (output, bias), and a user's addition of the two."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.part = randomize(MODULES[kind]()).to(device())

    def forward(self, x):
        output, bias, *_ = self.part(x)
        return output + bias


class Layer(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = randomize(nn.TransformerLayer(HIDDEN, 96, 4, **LAYER, **options)).to(device())

    def forward(self, x):
        return self.layer(x)


MODELS = {
    "Linear": (lambda: WithBias("Linear"), ["part"]),
    "Linear of parts": (lambda: WithBias("Linear of parts"), ["part"]),
    "LayerNormLinear": (lambda: WithBias("LayerNormLinear"), ["part"]),
    "LayerNormMLP": (lambda: WithBias("LayerNormMLP"), ["part"]),
    "attention": (lambda: Layer({}), ["layer.self_attention"]),
    "mlp": (lambda: Layer({"activation": "swiglu", "normalization": "RMSNorm"}), ["layer.layernorm_mlp"]),
    "blocks": (lambda: Layer({"fuse_qkv_params": True}), ["layer.self_attention", "layer.layernorm_mlp"]),
    "attention's parts": (
        lambda: Layer({"bias": False}), ["layer.self_attention.layernorm_qkv", "layer.self_attention.proj"]),
    "proj": (lambda: Layer({}), ["layer.self_attention.proj"]),
}


def steps(model, x):
    """Returns, for two runs, the outputs, and the gradients of all parameters, whole."""
    outputs = []
    for _ in range(2):
        y = model(x)
        y.square().sum().backward()
        outputs.append(y.detach())
    grads = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(model).items()
    }
    return outputs, grads


def are_close(grad, expected):
    """Sums in another order; that of a key's bias is zero but for rounding."""
    return (grad - expected).norm() <= 1e-5 * max(expected.norm().item(), 1)


def run_fsdp2(kind, quantized, low_precision):
    make, parts = MODELS[kind]
    single, model = make(), make()
    if quantized:
        for one in (single, model):
            qshard.quantize_(one, qshard.Float8BlockScaling(), filter_fn=lambda *_: True)
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16 if low_precision else None)
    for part in parts:
        fully_shard(model.get_submodule(part), mesh=full_mesh(), mp_policy=policy)
    fully_shard(model, mesh=full_mesh())
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device())
    outputs, grads = steps(model, x)
    if low_precision:
        return all(bool(y.isfinite().all()) for y in outputs)
    expected_outputs, expected_grads = steps(single, x)
    assert_bits(outputs, expected_outputs)
    for name, expected in expected_grads.items():
        assert are_close(grads[name], expected)
    with torch.no_grad():
        assert_bits(model.eval()(x), single.eval()(x))
    return True


@pytest.mark.pairwise
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("kind", MODELS)
@on_ranks(2)
def test_parts_under_fsdp2(kind, quantized):
    assert run_fsdp2(kind, quantized, False)


@on_ranks(2)
def test_parts_under_fsdp2_whose_results_are_cast():
    assert run_fsdp2("blocks", True, True)


@pytest.mark.parametrize("kind", MODELS)
@on_ranks(2)
def test_parts_under_fsdp1(kind):
    make, parts = MODELS[kind]
    single, model = make(), make()
    options = {"use_orig_params": True, "device_id": device()}
    for part in parts:
        model.set_submodule(part, FullyShardedDataParallel(model.get_submodule(part), **options))
    model = FullyShardedDataParallel(model, **options)
    x = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device())
    outputs, _ = steps(model, x)
    expected_outputs, expected = steps(single, x)
    assert_bits(outputs, expected_outputs)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            wanted = expected[name.replace("_fsdp_wrapped_module.", "")]
            assert are_close(parameter.grad, wanted)
    assert True
