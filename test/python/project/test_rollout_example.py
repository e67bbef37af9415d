"""examples/rollout: a stock transformers model gets the trainer's codes, by broadcast and by shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import on_ranks
from example_scripts import EXAMPLES, example

import qshard

pytest.importorskip("transformers", reason="needs transformers; `make test-clients` installs it")
BUDGET_S = 60
CHECKOUT = Path(__file__).parents[3]
ROLLOUT = EXAMPLES / "rollout"
SMALL = "--steps 2 --layers 1".split()


def plain_of(rollout, trainer):
    """A plain model of the trainer's dequantized codes, with the receiver's activations."""
    model = rollout.transformers.LlamaForCausalLM(rollout.config_of(trainer.args)).eval()
    weights = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        weight = weights[name].detach()
        values = torch.ops.qshard.dequantize(weight) if qshard.is_quantized(weight) else weight
        parameter.data.copy_(values)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.forward = lambda x, module=module: F.linear(rollout.quantized_activations(x), module.weight)
    return model


def test_the_receiver_is_a_model_of_the_trainers_codes():
    rollout = example("rollout", ROLLOUT)
    args = rollout.arguments("", SMALL)
    trainer = rollout.Trainer(args)
    receiver = rollout.Receiver(args, trainer.ignored())
    for step in range(2):
        trainer.step(step)
        options = dict(layout="deepseek-fp8", plain_dtype=torch.float32)
        receiver.load(qshard.checkpoint.quantized_tensors(trainer.model, **options))
        own, got = trainer.logits(), receiver.logits()
        with torch.no_grad():
            want = plain_of(rollout, trainer)(rollout.tokens(args, -1)).logits
        assert abs(rollout.kl(own, got) - rollout.kl(own, want)) < 1e-6
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert rollout.kl(own, got) < 1e-2


@on_ranks(3, devices=("cpu",))
def test_broadcast():
    lines = example("broadcast", ROLLOUT).main(SMALL)
    rank = torch.distributed.get_rank()
    assert len(lines) == (2 if rank == 2 else 0)
    for line in lines:
        assert re.fullmatch(r"step \d: loss [\d.]+, logits .* \| .*, KL [\d.]+e-\d\d", line), line


def test_shared_memory():
    """In processes of their own: the receiver's is one more."""
    pytest.importorskip("tqdm", reason="needs tqdm")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"QSHARD_LIBRARY": qshard.library_path(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [*command, ROLLOUT / "shared_memory.py", *SMALL],
        capture_output=True, text=True, timeout=280, env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"^step \d: loss .* KL [\d.]+e-\d\d$", done.stdout, re.MULTILINE)) == 2, done.stdout
