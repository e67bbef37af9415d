"""transformers: generate, save_pretrained, Trainer."""

import contextlib

import pytest
import torch
from client_models import (
    RECIPES,
    Text,
    assert_near,
    batch,
    compiling,
    different,
    llama,
    losses_logged,
)
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import qshard
from qshard.integrations.transformers import QuantizationStateCallback

BUDGET_S = 90  # Inductor compiles models
recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(num_beams=3), dict(do_sample=True)], ids=str)
def test_generate_is_that_of_the_dequantized_codes(options, tied):
    model = qshard.quantize_(llama(tied), RECIPES["float8_blockwise"]).eval()
    prompt = batch(0)["input_ids"]
    options = dict(max_new_tokens=6, pad_token_id=0, **options)
    torch.manual_seed(0)
    tokens = model.generate(prompt, **options)
    codes = qshard.quantize_(llama(tied), RECIPES["float8_blockwise"], keep_master=False)
    plain = qshard.dequantize_(codes).eval()
    torch.manual_seed(0)
    assert torch.equal(tokens, plain.generate(prompt, **options))


@pytest.mark.parametrize("tied", [False, True])
@recipes
def test_from_pretrained_of_what_save_pretrained_wrote(recipe, tied, tmp_path):
    model = qshard.quantize_(llama(tied), RECIPES[recipe])
    model(**batch(0)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    plain, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not different(model, plain)
    assert not info["missing_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@recipes
def test_memory_footprint_is_what_the_tensors_occupy(recipe, keep_master):
    model = llama().to(torch.bfloat16)
    plain = model.get_memory_footprint()
    assert plain == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for block in model.model.layers:  # the model itself is never what quantize_ is given
        qshard.quantize_(block, RECIPES[recipe], keep_master=keep_master)
    occupied = sum(row.image + row.master + row.grid + row.pending for row in qshard.report(model))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    found = model.get_memory_footprint()
    assert occupied + buffers <= found <= occupied + buffers + 16 * len(list(model.parameters()))
    assert found - buffers == model.get_memory_footprint(return_buffers=False)
    assert keep_master or found < plain
    assert qshard.dequantize_(model).get_memory_footprint() == plain


def arguments(folder, **kwargs):
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, save_steps=3,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        **{"max_steps": 6, **kwargs},
    )


@pytest.mark.parametrize("tied", [False, True])
@recipes
def test_a_resumed_trainer_goes_on_as_the_uninterrupted_one(recipe, tied, tmp_path):
    def trainer(seed):
        model = qshard.quantize_(llama(tied, seed), RECIPES[recipe])
        return Trainer(model, arguments(tmp_path), train_dataset=Text())

    first = trainer(0)
    first.train()
    second = trainer(1)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses_logged(first)[3:] == losses_logged(second)[-3:]
    assert not different(first.model, second.model)


@pytest.mark.takes_a_minute
def test_the_trainer_compiles(tmp_path):
    runs = []
    for options in ({}, dict(torch_compile_backend="inductor")):
        model = qshard.quantize_(llama(), RECIPES["float8_blockwise"])
        runs.append(Trainer(model, arguments(tmp_path, max_steps=2, **options), train_dataset=Text()))
        with compiling() if options else contextlib.nullcontext():
            runs[-1].train()
    assert_near(*map(losses_logged, runs), rtol=1e-3)  # logged to four digits


class QuantizeFirst(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        qshard.quantize_(model, RECIPES["float8_blockwise"])


def test_quantize_in_a_callback_trains_all_weights(tmp_path):
    """The Trainer has made its optimizer by then."""
    late = Trainer(llama(), arguments(tmp_path), train_dataset=Text(), callbacks=[QuantizeFirst()])
    late.train()
    early = Trainer(
        qshard.quantize_(llama(), RECIPES["float8_blockwise"]), arguments(tmp_path), train_dataset=Text()
    )
    early.train()
    assert losses_logged(late) == losses_logged(early) and not different(late.model, early.model)
    untrained = llama()
    assert len(different(late.model, untrained)) == len(list(untrained.parameters()))


@pytest.mark.parametrize("tied", [False, True])
@recipes
def test_state_beside_the_model_resumes_and_leaves_no_unexpected_keys(recipe, tied, tmp_path):
    def trainer(seed, **kwargs):
        model = qshard.quantize_(llama(tied, seed), RECIPES[recipe], persistent_state=False)
        callbacks = [QuantizationStateCallback(**kwargs)]
        return Trainer(model, arguments(tmp_path / str(seed)), train_dataset=Text(), callbacks=callbacks)

    first = trainer(0)
    first.train()
    checkpoint = str(tmp_path / "0" / "checkpoint-3")
    second = trainer(1, resume_from_checkpoint=checkpoint)
    second.train(resume_from_checkpoint=checkpoint)
    assert losses_logged(first)[3:] == losses_logged(second)[-3:]
    assert not different(first.model, second.model)
    first.save_model(str(tmp_path / "model"))
    plain, info = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not different(first.model, plain)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    with pytest.raises(FileNotFoundError, match="give it the folder"):
        trainer(2).train(resume_from_checkpoint=checkpoint)


def test_checkpoints_without_masters_name_the_way_out(tmp_path):
    """The Trainer's are safetensors files."""
    model = qshard.quantize_(llama(), RECIPES["nvfp4"], keep_master=False)
    with pytest.raises(RuntimeError, match="without a master.*qshard::dequantize"):
        Trainer(model, arguments(tmp_path), train_dataset=Text()).train()


@pytest.mark.parametrize("use_reentrant", [False, True])
@recipes
def test_gradient_checkpointing_changes_nothing(recipe, use_reentrant):
    def gradients(recompute):
        model = qshard.quantize_(llama(), RECIPES[recipe]).train()
        if recompute:
            model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
            model.enable_input_require_grads()
        loss = model(**batch(0)).loss
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    (loss, plain), (again, recomputed) = gradients(False), gradients(True)
    assert loss == again
    assert all(torch.equal(recomputed[name], grad) for name, grad in plain.items())


@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
def test_a_compiled_model_is_the_eager_one(recipe):
    """As a whole, without a break of the graph."""
    def step(compiled):
        model = qshard.quantize_(llama(), RECIPES[recipe])
        run = torch.compile(model, backend="inductor", fullgraph=True) if compiled else model
        loss = run(**batch(0)).loss
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    (loss, eager), (again, compiled) = step(False), step(True)
    assert_near([again], [loss])
    for name, grad in eager.items():
        assert torch.allclose(compiled[name], grad, rtol=1e-5, atol=1e-7), name
