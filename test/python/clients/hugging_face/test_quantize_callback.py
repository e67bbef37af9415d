"""QuantizeCallback: a Trainer of one process, DDP and FSDP2 that quantizes its model itself, and what quantizing at
another time says."""

import contextlib

import pytest
import torch
from client_models import RECIPES, Text, assert_near, compiling, different, llama, losses_logged
from client_worlds import trainers
from dist_helpers import on_ranks, shared_folder
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import qshard
from qshard.integrations.transformers import QuantizeCallback
from qshard.module_state import dynamics_of

BUDGET_S = 60
DDP = dict(ddp_backend="gloo")
FSDP2 = dict(DDP, fsdp=True, fsdp_config=dict(state_dict_type="FULL_STATE_DICT", version=2))


def arguments(folder, **kwargs):
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        **{"max_steps": 4, **kwargs},
    )


def trainer(folder, callback, model=None, **kwargs):
    callbacks = [] if callback is None else [callback]
    model = llama() if model is None else model
    return Trainer(model, arguments(folder, **kwargs), train_dataset=Text(), callbacks=callbacks)


def quantized_names(model):
    return {name for name, p in model.named_parameters() if qshard.is_quantized(p)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_callback_trains_as_a_model_quantized_before(recipe, tmp_path):
    """As a model that was quantized before; a resumed run goes on as the uninterrupted one."""
    early = trainer(tmp_path / "early", None, qshard.quantize_(llama(), RECIPES[recipe]))
    late = trainer(tmp_path / "late", QuantizeCallback(RECIPES[recipe]))
    assert not quantized_names(late.model)
    for each in (early, late):
        each.train()
    assert losses_logged(late) == losses_logged(early) and not different(late.model, early.model)
    assert quantized_names(late.model) == quantized_names(early.model)
    checkpoint = str(tmp_path / "late" / "checkpoint-2")
    callback = QuantizeCallback(RECIPES[recipe], resume_from_checkpoint=checkpoint)
    again = trainer(tmp_path / "again", callback, llama(seed=1))
    again.train(resume_from_checkpoint=checkpoint)
    assert losses_logged(again)[-2:] == losses_logged(early)[2:]
    assert not different(again.model, early.model)
    _, info = LlamaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))


def test_training_twice_quantizes_once(tmp_path):
    run = trainer(tmp_path, QuantizeCallback(RECIPES["nvfp4"]))
    run.train()
    run.train()
    assert quantized_names(run.model)


def test_weights_that_stay_plain_are_known(tmp_path):
    recipe, options = RECIPES["float8_delayed"], {"weights": "dynamic"}
    run = trainer(tmp_path, QuantizeCallback(recipe, **options))
    run.train()
    before = [dynamic for _, dynamic in dynamics_of(run.model)]
    run.train()
    after = [dynamic for _, dynamic in dynamics_of(run.model)]
    assert before and all(a is b for a, b in zip(after, before, strict=True))
    with pytest.raises(ValueError, match="quantized before the Trainer was made"):
        trainer(tmp_path, QuantizeCallback(recipe), qshard.quantize_(llama(), recipe, **options))


def test_an_attribute_of_the_users_is_no_quantization(tmp_path):
    model = llama()
    model.dynamic = "mine"
    run = trainer(tmp_path, QuantizeCallback(RECIPES["nvfp4"]), model)
    run.train()
    assert quantized_names(run.model) and model.dynamic == "mine"


def test_adapters_stay_plain(tmp_path):
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "up_proj"]))
    trainer(tmp_path, QuantizeCallback(RECIPES["nvfp4"], keep_master=False), model).train()
    names = quantized_names(model)
    assert not any("lora" in name for name in names)
    assert sum("base_layer" in name for name in names) == 4


def test_other_orders_and_arguments(tmp_path):
    recipe = RECIPES["float8_blockwise"]
    with pytest.raises(ValueError, match="quantized before the Trainer was made"):
        trainer(tmp_path, QuantizeCallback(recipe), qshard.quantize_(llama(), recipe))
    with pytest.raises(TypeError, match="persistent_state is False"):
        QuantizeCallback(recipe, persistent_state=True)
    base = qshard.quantize_(llama().to(torch.bfloat16), recipe)
    with pytest.raises(RuntimeError, match="In the Trainer.*QuantizeCallback.*PEFT come before quantize_"):
        prepare_model_for_kbit_training(base)


@pytest.mark.parametrize(
    "mode, recipe, dtype, keep_master, tied",
    [
        ("ddp", "float8_delayed", None, True, True),
        ("ddp", "nvfp4", torch.bfloat16, True, False),
        ("fsdp2", "float8_delayed", None, True, False),
        ("fsdp2", "float8_blockwise", torch.bfloat16, True, False),
        ("fsdp2", "nvfp4", None, False, True),
        ("fsdp2", "mxfp8", torch.bfloat16, False, False),
    ],
)
@on_ranks(2, devices=("cpu",))
def test_the_callback_trains_shards_and_resumes(mode, recipe, dtype, keep_master, tied):
    options = dict(FSDP2 if mode == "fsdp2" else DDP, bf16=dtype is not None)
    if not keep_master:
        options["save_strategy"] = "no"
    with trainers(), shared_folder() as folder:
        model = llama(tied).to(dtype or torch.float32)
        callback = QuantizeCallback(RECIPES[recipe], keep_master=keep_master)
        run = trainer(folder, callback, model, **options)
        run.train()
        assert run.accelerator.is_fsdp2 == (mode == "fsdp2")
        kept = {name for name, p in run.model.named_parameters() if "proj" in name}
        assert kept and kept <= quantized_names(run.model)
        if not keep_master:
            return
        checkpoint = str(folder / "checkpoint-2")
        callback = QuantizeCallback(RECIPES[recipe], resume_from_checkpoint=checkpoint)
        model = llama(tied, seed=1).to(dtype or torch.float32)
        again = trainer(folder / "again", callback, model, **options)
        again.train(resume_from_checkpoint=checkpoint)
        assert losses_logged(again)[-2:] == losses_logged(run)[2:]


@on_ranks(2, devices=("cpu",))
def test_other_orders_of_two_ranks():
    recipe = RECIPES["float8_blockwise"]
    with trainers(), shared_folder() as folder:
        early = qshard.quantize_(llama().to(torch.bfloat16), recipe)
        run = trainer(folder, None, early, bf16=True, **FSDP2)
        with pytest.raises(RuntimeError, match="In the Trainer.*QuantizeCallback.*casts of.*come before quantize_"):
            run.train()
    with trainers(), shared_folder() as folder:
        base = qshard.quantize_(llama(), recipe, keep_master=False)
        run = trainer(folder, None, base, **FSDP2)
        with pytest.raises(RuntimeError, match="without a master.*In the Trainer.*QuantizeCallback.*after its prepare"):
            run.train()
    with trainers(), shared_folder() as folder:
        run = trainer(folder, None, **DDP)
        run.add_callback(QuantizeCallback(recipe))
        with pytest.raises(RuntimeError, match="give the callback to the Trainer when it is made"):
            run.train()


def test_compiled_by_inductor(tmp_path):
    runs = []
    for options in ({}, dict(torch_compile=True)):
        callback = QuantizeCallback(RECIPES["float8_blockwise"])
        runs.append(trainer(tmp_path, callback, max_steps=2, save_strategy="no", **options))
        with compiling() if options else contextlib.nullcontext():
            runs[-1].train()
    assert_near(*map(losses_logged, runs), rtol=1e-3)  # logged to four digits
