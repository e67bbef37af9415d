"""TRL's SFTTrainer, quantized by QuantizeCallback, in one process and under FSDP2: all weights, and adapters beside a
base without masters."""

import datasets
import pytest
import torch
from client_models import RECIPES, VOCABULARY, Text, llama, losses_logged
from client_worlds import trainers
from dist_helpers import on_ranks, shared_folder
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import qshard
from qshard.integrations.transformers import QuantizeCallback

BUDGET_S = 60


def tokenizer():
    words = WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="1", eos_token="2", unk_token="0"
    )


FSDP2 = dict(
    ddp_backend="gloo", fsdp=True, fsdp_config=dict(state_dict_type="FULL_STATE_DICT", version=2)
)
LORA = LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def trainer(folder, callback, model, peft_config=None, **options):
    rows = [{"input_ids": Text()[i]["input_ids"].tolist()} for i in range(16)]
    options = {"max_steps": 3, "bf16": False, **options}
    return SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            report_to=[], use_cpu=True, disable_tqdm=True, seed=1, **options,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=[callback],
    )


def train_adapters(run):
    """Trains, and sees that adapters were trained and stayed plain, and that the base did not and was quantized."""
    before = {n: p.detach().clone() for n, p in run.model.named_parameters() if "lora" in n}
    run.train()
    after = dict(run.model.named_parameters())
    base = [p for n, p in after.items() if "base_layer.weight" in n]
    assert len(base) == 4 and all(map(qshard.is_quantized, base))
    assert before and not any(qshard.is_quantized(after[n]) for n in before)
    return before, after


def test_adapters_over_a_base_without_masters(tmp_path):
    callback = QuantizeCallback(RECIPES["nvfp4"], keep_master=False)
    before, after = train_adapters(trainer(tmp_path, callback, llama(), LORA))
    assert any(not torch.equal(after[n], p) for n, p in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@on_ranks(2, devices=("cpu",))
def test_all_weights_train_and_resume_under_fsdp2(dtype):
    """A model of transformers 5 is bfloat16 unless it is asked for another dtype."""
    recipe, options = RECIPES["float8_delayed"], dict(FSDP2, max_steps=4, save_steps=2, bf16=dtype is torch.bfloat16)
    with trainers(), shared_folder() as folder:
        run = trainer(folder, QuantizeCallback(recipe), llama().to(dtype), **options)
        run.train()
        assert run.accelerator.is_fsdp2
        weights = [p for name, p in run.model.named_parameters() if "proj" in name]
        assert weights and all(map(qshard.is_quantized, weights))
        checkpoint = str(folder / "checkpoint-2")
        callback = QuantizeCallback(recipe, resume_from_checkpoint=checkpoint)
        again = trainer(folder / "again", callback, llama(seed=1).to(dtype), **options)
        again.train(resume_from_checkpoint=checkpoint)
        assert losses_logged(again)[-2:] == losses_logged(run)[2:]


@on_ranks(2, devices=("cpu",))
def test_adapters_over_a_base_without_masters_under_fsdp2():
    with trainers(), shared_folder() as folder:
        callback = QuantizeCallback(RECIPES["nvfp4"], keep_master=False)
        run = trainer(folder, callback, llama(), LORA, save_strategy="no", **FSDP2)
        before, after = train_adapters(run)
        assert run.accelerator.is_fsdp2
        assert any(not torch.equal(after[n].full_tensor(), p) for n, p in before.items())
