"""bitsandbytes' 8-bit and paged optimizers: operators on CPUs, kernels on a GPU."""

import bitsandbytes
import pytest
import torch

import qshard

RECIPES = {
    "float8_rowwise": qshard.Float8RowwiseScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}
OPTIMIZERS = ["Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit", "PagedLion8bit"]
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])
# bitsandbytes pages on GPUs alone.
pages_on_gpus = pytest.mark.only_where(lambda name, device: device == "cuda" or not name.startswith("Paged"))
recipes = pytest.mark.parametrize("recipe", RECIPES)


def build(recipe, name, device, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 130), torch.nn.Linear(130, 64)).to(device)
    if recipe is not None:
        qshard.quantize_(model, recipe, weight_only=True, **kwargs)
    return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2)


def step_through(model, optimizer, steps):
    for step in steps:
        # The same gradients for both models: what is compared is the optimizer.
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(recipe, name, device, steps=3, **kwargs):
    return step_through(*build(recipe, name, device, **kwargs), range(steps))


@devices
@recipes
@pytest.mark.parametrize("name", OPTIMIZERS)
@pages_on_gpus
def test_steps_are_those_of_a_plain_parameter(recipe, name, device):
    model, plain = train(RECIPES[recipe], name, device), train(None, name, device)
    for (key, param), other in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(param.detach() * 1, other.detach()), key
    for layer in model:
        # The step was seen: codes are made of the new values.
        weight = layer.weight.detach()
        again = qshard.ops.quantize(weight * 1, RECIPES[recipe].format)
        assert torch.equal(qshard.ops.dequantize(weight), qshard.ops.dequantize(again))


@devices
@recipes
def test_without_a_master_a_step_is_rounded_to_codes(recipe, device):
    before = train(RECIPES[recipe], "AdamW8bit", device, steps=0, keep_master=False)
    after = train(RECIPES[recipe], "AdamW8bit", device, steps=1, keep_master=False)
    for i, (quantized, start) in enumerate(zip(after, before)):
        plain = torch.nn.Parameter(start.weight.detach() * 1)
        optimizer = bitsandbytes.optim.AdamW8bit([plain], lr=1e-2)
        generator = torch.Generator().manual_seed(2 * i)
        plain.grad = torch.randn(plain.shape, generator=generator).to(device)
        optimizer.step()
        again = qshard.ops.quantize(plain.detach(), RECIPES[recipe].format)
        assert torch.equal(quantized.weight.detach() * 1, again * 1)


@devices
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pages_on_gpus
def test_saved_states_go_on_where_they_were(name, keep_master, device, tmp_path):
    arguments = RECIPES["float8_blockwise"], name, device
    model, optimizer = build(*arguments, keep_master=keep_master)
    assert "known" in qshard.report(model, optimizer=optimizer).clients[1].split()
    step_through(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state")
    other, second = build(*arguments, keep_master=keep_master, seed=1)
    saved = torch.load(tmp_path / "state")
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    step_through(model, optimizer, range(2, 4))
    step_through(other, second, range(2, 4))
    for (key, param), loaded in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(param.detach() * 1, loaded.detach() * 1), key
