"""bitsandbytes' 8-bit and paged optimizers, kernels on a GPU that write through addresses, over weights with
masters."""

import pytest
import torch

import qshard

if not torch.cuda.is_available():
    pytest.skip("bitsandbytes' optimizers are tested on a GPU, found none", allow_module_level=True)
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

RECIPES = {
    "float8_blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}
OPTIMIZERS = ["Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit", "PagedLion8bit"]


def train(recipe, optimizer, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 130), torch.nn.Linear(130, 64)).cuda()
    if recipe is not None:
        qshard.quantize_(model, recipe, weight_only=True)
    optimizer = getattr(bitsandbytes.optim, optimizer)(model.parameters(), lr=1e-2)
    for step in range(steps):
        # The same gradients for both models: what is compared is the optimizer.
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            param.grad = torch.randn(param.shape, generator=generator).cuda()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_of_a_plain_parameter(recipe, optimizer):
    model, plain = train(RECIPES[recipe], optimizer), train(None, optimizer)
    for (name, param), other in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(param.detach() * 1, other.detach()), name
    for layer in model:
        # The step was seen: codes are made of the new values.
        weight = layer.weight.detach()
        again = qshard.ops.quantize(weight * 1, RECIPES[recipe].format)
        assert torch.equal(qshard.ops.dequantize(weight), qshard.ops.dequantize(again))


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "PagedAdamW8bit"])
def test_without_a_master_it_is_an_error_that_changes_nothing(optimizer):
    model = torch.nn.Sequential(torch.nn.Linear(256, 128)).cuda()
    qshard.quantize_(model, RECIPES["float8_blockwise"], keep_master=False)
    before = model[0].weight.detach() * 1
    stepping = getattr(bitsandbytes.optim, optimizer)([model[0].weight], lr=1e-2)
    model[0].weight.grad = torch.ones(128, 256, device="cuda")
    with pytest.raises(RuntimeError, match="data_ptr|address|storage"):
        stepping.step()
    assert torch.equal(model[0].weight.detach() * 1, before)
