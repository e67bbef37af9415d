"""examples/train_moe.py on meshes of experts: what it trains, sends and saves."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import full_mesh, on_ranks
from example_scripts import example

BUDGET_S = 45
SMALL = "--dim 128 --hidden 96 --layers 2 --heads 4 --seq-len 32 --batch 4 --steps 40".split()


def trainer(format, ep, *options):
    train_moe = example("train_moe")
    mesh, experts = full_mesh(4, names=("dp",)), full_mesh(4 // ep, ep, names=("efsdp", "ep"))
    args = train_moe.parse_arguments(["--format", format, *SMALL, "--ep", str(ep), *options])
    return train_moe.Trainer(format, args, mesh, experts)


@on_ranks(4)
def test_training_with_expert_parallelism(tmp_path):
    """Checkpoints load on other expert meshes, where losses go on as they would have; what is sent to experts is codes."""
    train, sent = example("train_moe").train_llama.train, {}
    trained = trainer("float8_blockwise", 4)
    sent["codes"] = of_all_ranks(train(trained, 0, 2)["dispatched_bytes"])
    trained.save(tmp_path)
    losses = train(trained, 2, 4)["losses"]
    for ep in (1, 2):
        resumed = trainer("float8_blockwise", ep)
        resumed.load(tmp_path)
        assert train(resumed, 2, 4)["losses"] == pytest.approx(losses, rel=1e-3), ep
    for name, arguments in (("bf16", ["bf16", 4]), ("values", ["float8_blockwise", 4, "--tokens", "values"])):
        sent[name] = of_all_ranks(train(trainer(*arguments), 0, 2)["dispatched_bytes"])
    # Two layers of 4 x 32 tokens in two slots. A result and its gradient travel for each slot, and so does a place; a
    # token and its gradient for each of its ranks. They are 128 bf16, or 144 bytes in codes.
    tokens = 2 * 4 * 32
    told = 2 * 4 * 4 * 5 * 8  # before them each rank gives each other one five numbers
    for name, both in (("bf16", 256 + 256), ("values", 256 + 256), ("codes", 256 + 144)):
        of_tokens = sent[name] - 2 * tokens * (both + 4) - told
        assert of_tokens % both == 0 and tokens < of_tokens // both < 2 * tokens, name


def of_all_ranks(number):
    number = torch.tensor(number)
    dist.all_reduce(number)
    return number.item()


@pytest.mark.parametrize("options", [["--ep", "3"], ["--ep", "0"]], ids=" ".join)
def test_experts_that_the_ranks_do_not_divide_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        example("train_moe").parse_arguments(options)
    assert "does not divide" in capsys.readouterr().err
