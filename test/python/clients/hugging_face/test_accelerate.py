"""accelerate: quantize_ before and after prepare, clipping, save_state, save_model, CPU offload."""

import warnings

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from client_models import RECIPES, assert_near, batch, compiling, different, llama

import qshard

recipes = pytest.mark.parametrize("recipe", RECIPES)


def prepared(recipe, order="quantize prepare", seed=0):
    accelerator = Accelerator(cpu=True)
    model = llama(seed=seed)
    if order == "quantize prepare":
        qshard.quantize_(model, RECIPES[recipe])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if order == "prepare quantize":
        qshard.quantize_(model, RECIPES[recipe])
    return accelerator, model, optimizer, scheduler


def train(accelerator, model, optimizer, scheduler, steps):
    losses = []
    for number in steps:
        loss = model(**batch(number)).loss
        accelerator.backward(loss)
        losses.append((loss.item(), accelerator.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


@recipes
def test_quantize_before_and_after_prepare(recipe):
    before, after = prepared(recipe), prepared(recipe, "prepare quantize")
    assert train(*before, range(4)) == train(*after, range(4))
    assert not different(before[1], after[1])
    untrained = llama()
    assert len(different(after[1], untrained)) == len(list(untrained.parameters()))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
@recipes
def test_load_state_goes_on_where_save_state_was(recipe, safe, tmp_path):
    first = prepared(recipe)
    train(*first, range(2))
    first[0].save_state(str(tmp_path), safe_serialization=safe)
    second = prepared(recipe, seed=1)
    second[0].load_state(str(tmp_path))
    assert train(*first, range(2, 5)) == train(*second, range(2, 5))
    assert not different(first[1], second[1])


@pytest.mark.takes_a_minute
def test_a_compiled_model_trains_as_the_eager_one():
    accelerator, model, *rest = prepared("float8_delayed")
    with compiling():
        compiled = torch.compile(model, backend="inductor")
        losses = train(accelerator, compiled, *rest, range(2))
    assert_near(losses, train(*prepared("float8_delayed"), range(2)))


@recipes
def test_get_state_dict_and_save_model_are_plain(recipe, tmp_path):
    accelerator, model, *rest = prepared(recipe)
    train(accelerator, model, *rest, range(1))
    state = accelerator.get_state_dict(model)
    plain = llama(seed=1)
    plain.load_state_dict(state, strict="delayed" not in recipe)
    assert not different(model, plain)
    accelerator.save_model(model, str(tmp_path))
    assert (tmp_path / "model.safetensors").exists()


def test_modules_say_that_cpu_offload_made_them_plain():
    """Its hooks write values into module._parameters before a forward, and take them out after it."""
    model = qshard.quantize_(llama(), RECIPES["float8_blockwise"])
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, qshard.nn.Linear)]
    cpu_offload(model, torch.device("cpu"))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch(0))
    said = [str(w.message) for w in caught if "was quantized, and a plain parameter" in str(w.message)]
    assert len(names) > 14 and [text.split()[1] for text in said] == names
