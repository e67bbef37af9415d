"""The Trainer of transformers on two ranks, DDP and FSDP2: checkpoints, resume, save_model."""

import contextlib

import pytest
import torch.distributed as dist
from client_models import RECIPES, Text, assert_near, compiling, llama, losses_logged
from client_worlds import trainers
from dist_helpers import on_ranks, shared_folder
from models.weights import different, local_values
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import qshard
from qshard.integrations.transformers import QuantizationStateCallback

BUDGET_S = 75
MODES = {
    "ddp": dict(),
    "fsdp2-full": dict(state_dict_type="FULL_STATE_DICT"),
    "fsdp2-sharded": dict(state_dict_type="SHARDED_STATE_DICT"),
    "fsdp2-efficient": dict(state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=True),
}
# (mode, recipe, tied, persistent_state)
CASES = [
    ("ddp", "float8_blockwise", True, True),
    ("ddp", "float8_delayed", False, True),
    ("ddp", "float8_delayed", True, False),
    ("fsdp2-full", "float8_blockwise", False, True),
    ("fsdp2-full", "float8_delayed", True, True),
    ("fsdp2-full", "float8_delayed", False, False),
    ("fsdp2-sharded", "mxfp8", True, True),
    ("fsdp2-sharded", "float8_delayed", False, True),
    ("fsdp2-sharded", "float8_delayed", True, False),
    ("fsdp2-efficient", "nvfp4", False, True),
    ("fsdp2-efficient", "float8_delayed", True, False),
]


def trainer(folder, recipe, mode, tied, seed=0, arguments=(), **kwargs):
    sharding = dict(fsdp=True, fsdp_config=dict(MODES[mode], version=2)) if "fsdp" in mode else {}
    model = qshard.quantize_(llama(tied, seed), RECIPES[recipe], **kwargs)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, ddp_backend="gloo",
        **sharding, **{"max_steps": 4, **dict(arguments)},
    )
    callbacks = [] if kwargs.get("persistent_state", True) else [QuantizationStateCallback()]
    return Trainer(model, arguments, train_dataset=Text(), callbacks=callbacks)


@pytest.mark.takes_a_minute
@pytest.mark.parametrize("mode", ["ddp", "fsdp2-sharded"])
@on_ranks(2, devices=("cpu",), compiles=True)
def test_compiled_models_train_as_eager_ones(mode):
    with trainers(), shared_folder() as folder:
        runs = []
        for options in ({}, dict(torch_compile_backend="inductor")):
            options = dict(max_steps=1, **options)
            runs.append(trainer(folder, "float8_blockwise", mode, False, arguments=options))
            with compiling() if runs[1:] else contextlib.nullcontext():
                runs[-1].train()
        assert_near(*map(losses_logged, runs), rtol=1e-3)


@pytest.mark.parametrize("mode, recipe, tied, persistent_state", CASES)
@on_ranks(2, devices=("cpu",))
def test_a_resumed_trainer_goes_on_as_the_uninterrupted_one(mode, recipe, tied, persistent_state):
    options = dict(persistent_state=persistent_state)
    with trainers(), shared_folder() as folder:
        first = trainer(folder, recipe, mode, tied, **options)
        first.train()
        assert first.accelerator.is_fsdp2 == ("fsdp" in mode)
        second = trainer(folder, recipe, mode, tied, seed=1, **options)
        second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert losses_logged(first)[2:] == losses_logged(second)[-2:]
        assert not different(local_values(first.model), local_values(second.model))
        saves_model = "SHARDED" not in MODES[mode].get("state_dict_type", "")
        if saves_model:  # with SHARDED_STATE_DICT the Trainer's save_model writes DCP's files
            first.save_model(str(folder / "model"))
            dist.barrier()
            plain, info = LlamaForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
            assert not info["missing_keys"] and not info["mismatched_keys"]
            assert persistent_state or not info["unexpected_keys"]
            full = dict(first.model.named_parameters())
            for name, value in plain.named_parameters():
                want = full[name].full_tensor() if "fsdp" in mode else full[name] * 1
                assert (value == want).all(), name
