"""PEFT: LoRA and DoRA over frozen quantized weights."""

import contextlib
import copy
import subprocess
import sys
import warnings

import pytest
import torch
from client_models import RECIPES, assert_near, batch, compiling, llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import qshard

BUDGET_S = 45  # Inductor compiles models
recipes = pytest.mark.parametrize("recipe", RECIPES)
masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


def with_adapters(model, **kwargs):
    torch.manual_seed(5)
    names = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, **kwargs))


def train(model, steps=3, clip=None):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for number in range(steps):
        losses.append(model(**batch(number)).loss)
        losses[-1].backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(trained, clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def base_weights(model):
    return {n: p.detach() * 1 for n, p in model.named_parameters() if "lora_" not in n}


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@masters
@recipes
def test_adapters_train_as_over_the_dequantized_weights(recipe, keep_master, use_dora):
    model = with_adapters(
        qshard.quantize_(llama(), RECIPES[recipe], keep_master=keep_master), use_dora=use_dora
    )
    before = base_weights(model)
    losses = train(model)
    assert losses[-1] < losses[0]
    after = base_weights(model)
    assert all(torch.equal(before[n], after[n]) for n in before if "lora" not in n and "base_layer" in n)
    if not keep_master:
        codes = qshard.quantize_(llama(), RECIPES[recipe], keep_master=False)
        twin = with_adapters(qshard.dequantize_(codes), use_dora=use_dora)
        assert train(twin) == losses


def test_quantize_after_the_adapters_came_leaves_them_out_where_told():
    model = with_adapters(llama())
    with pytest.warns(UserWarning, match="look like LoRA adapters"):
        qshard.quantize_(copy.deepcopy(model), RECIPES["float8_blockwise"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qshard.quantize_(
            model, RECIPES["float8_blockwise"], filter_fn=lambda module, name: "lora_" not in name
        )
    late = train(model)
    early = train(with_adapters(qshard.quantize_(llama(), RECIPES["float8_blockwise"])))
    assert late == early


@recipes
def test_merge_and_unmerge_with_masters_and_after_dequantize(recipe):
    model = with_adapters(qshard.quantize_(llama(), RECIPES[recipe]))
    train(model)
    merged = copy.deepcopy(model).merge_and_unload()
    plain = qshard.dequantize_(copy.deepcopy(model)).merge_and_unload()
    for (name, a), b in zip(merged.named_parameters(), plain.parameters()):
        assert torch.equal(a.detach() * 1, b.detach()), name
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = weight.detach() * 1
    model.merge_adapter()
    model.unmerge_adapter()
    assert torch.allclose(weight.detach() * 1, before, rtol=0, atol=1e-6)


@recipes
def test_merging_without_masters_quantizes_the_sum_again(recipe):
    model = with_adapters(qshard.quantize_(llama(), RECIPES[recipe], keep_master=False))
    train(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        total = layer.base_layer.weight + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    qshard.flush(merged)
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert qshard.is_quantized(weight) and not torch.equal(weight * 1, total)
    if recipe == "float8_delayed":  # whose scale is of values before these
        return
    again = qshard.ops.quantize(total, RECIPES[recipe].format)
    assert torch.equal(weight.detach() * 1, again * 1)


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@masters
def test_merging_dora_names_dequantize_which_is_the_way_out(keep_master, safe):
    """PEFT merges DoRA by weight.data = sum."""
    model = qshard.quantize_(llama(), RECIPES["float8_blockwise"], keep_master=keep_master)
    model = with_adapters(model, use_dora=True)
    train(model)
    before = base_weights(model)
    with pytest.raises(RuntimeError, match=r"x.data = y would put.*qshard.dequantize_\(model\)"):
        model.merge_and_unload(safe_merge=safe)
    assert all(torch.equal(before[n], value) for n, value in base_weights(model).items())
    plain = qshard.dequantize_(model).eval()
    with torch.no_grad():
        want = plain(**batch(0)).logits
        merged = plain.merge_and_unload(safe_merge=safe)
        torch.testing.assert_close(merged(**batch(0)).logits, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@masters
def test_saved_adapters_go_on_where_they_were(keep_master, use_dora, tmp_path):
    """save_pretrained writes the adapters alone, which from_pretrained puts over the same base."""
    def base():
        return qshard.quantize_(llama(), RECIPES["float8_blockwise"], keep_master=keep_master)

    model = with_adapters(base(), use_dora=use_dora)
    train(model, clip=0.01)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert names and all("lora_" in name for name in names)
    other = PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    assert train(model, clip=0.01) == train(other, clip=0.01)


@pytest.mark.takes_a_minute
def test_a_compiled_model_trains_as_the_eager_one():
    def run(compiled):
        model = with_adapters(qshard.quantize_(llama(), RECIPES["float8_blockwise"], keep_master=False))
        with compiling() if compiled else contextlib.nullcontext():
            return train(torch.compile(model, backend="inductor") if compiled else model)

    assert_near(run(True), run(False))


MERGES = """
import sys, warnings
sys.path[:0] = {path!r}
import qshard
from test_peft import RECIPES, llama, with_adapters

def warnings_of(change):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        change()
    return [str(w.message) for w in caught if "rounded to" in str(w.message)]

with_masters = with_adapters(qshard.quantize_(llama(), RECIPES["nvfp4"]))
assert not warnings_of(with_masters.merge_adapter)
model = with_adapters(qshard.quantize_(llama(), RECIPES["nvfp4"], keep_master=False))
(warning,) = warnings_of(model.merge_adapter)
assert "qshard.dequantize_(model)" in warning and "nvfp4" in warning, warning
assert not warnings_of(model.unmerge_adapter)
assert not warnings_of(model.merge_adapter)
"""


def test_the_first_merge_without_masters_warns():
    """Once in a process, so in one of its own."""
    code = MERGES.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
