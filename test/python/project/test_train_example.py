"""examples/train_llama.py on 2-D meshes: what it trains, gathers and saves."""

import pytest
import torch
from dist_helpers import full_mesh, on_ranks
from example_scripts import example

BUDGET_S = 45
SMALL = "--dim 64 --hidden 96 --layers 2 --heads 4 --seq-len 32 --batch 4 --steps 40".split()


def trainer(format, mesh, *options):
    train_llama = example("train_llama")
    args = ["--format", format, *SMALL, "--tp", str(mesh.size(1)), *options]
    args = train_llama.parse_arguments(args)
    return train_llama.Trainer(format, args, mesh)


def meshes():
    return [full_mesh(*shape, names=("dp", "tp")) for shape in ((4, 1), (2, 2))]


@on_ranks(4)
def test_training_with_tensor_parallelism(tmp_path):
    """Losses and bytes of FSDP2 alone and with tensor parallelism; the checkpoints of both go on on the
    other mesh."""
    train, steps = example("train_llama").train, 4
    fsdp, parallel = meshes()
    runs = {}
    for format in ("bf16", "float8_blockwise"):
        for mesh in (fsdp, parallel):
            trained = trainer(format, mesh)
            first = train(trained, 0, 2)
            trained.save(tmp_path / f"{format}-{mesh.size(1)}")
            second = train(trained, 2, steps)
            runs[format, mesh.size(1)] = {**first, "losses": first["losses"] | second["losses"]}
        losses = [list(runs[format, tp]["losses"].values()) for tp in (1, 2)]
        # Computed in bf16.
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=0)
    for saved, mesh in ((1, parallel), (2, fsdp)):
        resumed = trainer("float8_blockwise", mesh)
        resumed.load(tmp_path / f"float8_blockwise-{saved}")
        losses = train(resumed, 2, steps)["losses"]
        for step, loss in losses.items():
            assert loss == pytest.approx(runs["float8_blockwise", saved]["losses"][step], rel=1e-3)
    # Each layer sends four activations, in codes or bf16; the head's input, the logits and the embedding's
    # gradient are sent as values in bf16; and FSDP2 sends half of the weights.
    tokens, dim, vocabulary, layers = 2 * 32, 64, 256, 2
    for format, size in (("bf16", 2), ("float8_blockwise", 1)):
        activations = tokens * (4 * layers * dim * size + 2 * (2 * dim + vocabulary))
        weights = runs[format, 2]["gathered_bytes"] - activations
        share = weights / runs[format, 1]["gathered_bytes"]
        assert 0.48 < share < 0.53, (format, share)


@on_ranks(2)
def test_the_example_writes_text():
    mesh = full_mesh(1, 2, names=("dp", "tp"))
    texts = {trainer("float8_blockwise", mesh).generate(b"def", 10) for _ in range(2)}
    assert len(texts) == 1 and texts.pop().startswith("def")


@pytest.mark.parametrize(
    "options", [["--tp", "4"], ["--tp", "0"], ["--tp", "2", "--seq-len", "33"]], ids=" ".join
)
def test_sizes_that_the_ranks_do_not_divide_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        example("train_llama").parse_arguments(options)
    assert "does not divide" in capsys.readouterr().err
