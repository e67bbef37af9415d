"""Weights with two row images: both in every all-gather, or in each pass the one that it reads."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import gathers
from dist_helpers import on_ranks, on_worlds
from helpers import ceil_div, has_two_images, ops, row_bytes
from models.fsdp2 import build, build_oracle
from models.training import adamw, batch, loss_of, train
from models.weights import check_gathered, different, local, local_values, unsharded
from test_fsdp_modes import error_of

BOTH, PHASE = "mxfp8_1x32", "mxfp8_1x32[phase]"


def build_resharding(format, **kwargs):
    return build(format, reshard_after_forward=True, **kwargs)


# ----------------------------------------------------------------------------------- wire


def group_bytes(module):
    """(rowwise or columnwise, both) bytes that one rank sends of the parameters grouped there."""
    one = both = 0
    for param in module.parameters():
        padded_rows = ceil_div(param.shape[0], dist.get_world_size())
        if not ops.is_quantized(local(param)):
            bytes_of_row = images = param.shape[1:].numel() * 4
        else:
            format = ops.format(local(param))
            images = row_bytes(format, param.shape[1])
            bytes_of_row = images // 2 if has_two_images(format) else images
        one += padded_rows * bytes_of_row
        both += padded_rows * images
    return one, both


@pytest.mark.pairwise
@pytest.mark.parametrize("format", [BOTH, PHASE])
@pytest.mark.parametrize("rows", [257, 5])
@on_ranks(2, 4)
def test_bytes_of_each_pass(rows, format):
    model = build_resharding(format, rows=rows)
    optimizer = adamw(model)
    train(model, optimizer, steps=1)

    def seen(input):
        return torch._C._current_graph_task_id() != -1, input.dtype, input.nbytes

    with gathers(seen) as sent:
        train(model, optimizer, steps=1, first_step=1)
    which = 0 if format == PHASE else 1
    groups = [*model.blocks, model.head]
    want = [(torch.uint8, group_bytes(group)[which]) for group in groups]
    by_pass = [[call[1:] for call in sent if call[0] is backward] for backward in (False, True)]
    # The root's group comes first in forward and in backward; sizes are the same in both.
    assert by_pass == [[want[2], *want[:2]], [want[2], *want[1::-1]]], by_pass


@pytest.mark.parametrize("format", [BOTH, PHASE])
@on_ranks(1, 2, 3)
def test_images_of_each_pass(format):
    """The gathered bytes are those of quantizing the whole weight on one device."""
    model = build_resharding(format)
    seen = []

    def look_in_backward(module, inputs, outputs):
        outputs.register_hook(lambda _: seen.append(images_of(module.up.weight)))

    def images_of(weight):
        images = {}
        for name, accessor in (("row", ops.codes), ("column", ops.columnwise_codes)):
            try:
                images[name] = accessor(weight.detach()).float()
            except RuntimeError as error:
                assert 'gather="both"' in str(error), error
        return images

    weight = model.blocks[0].up.weight.detach()
    whole = ops.quantize(weight.full_tensor() * 1, BOTH, keep_master=True)
    block = model.blocks[0]
    block.register_forward_hook(look_in_backward)
    loss_of(model, batch(0)).backward()
    both = {"row": ops.codes(whole).float(), "column": ops.columnwise_codes(whole).float()}
    (in_backward,) = seen
    assert set(in_backward) == ({"column"} if format == PHASE else {"row", "column"})
    for name, codes in in_backward.items():
        assert torch.equal(codes, both[name]), name
    with unsharded(model):
        in_forward = images_of(block.up.weight)
    assert set(in_forward) == ({"row"} if format == PHASE else {"row", "column"})
    for name, codes in in_forward.items():
        assert torch.equal(codes, both[name]), name


# ------------------------------------------------------------------------------- training


def run_training(format, keep_master, rows):
    model = build_resharding(format, keep_master=keep_master, rows=rows)
    losses = train(model, microbatches=2)
    if format == BOTH:
        check_gathered(model)
    if keep_master:
        oracle = build_oracle(format, rows=rows, reshard_after_forward=True)
        assert train(oracle, microbatches=2) == losses
        assert not different(local_values(model), local_values(oracle))
    return losses


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("rows", [257, 3])
@on_worlds(1, 2, 3, 4, devices=("cpu",))
def test_gathering_by_phase_trains_alike(world, rows, keep_master):
    losses = [world.run(run_training, format, keep_master, rows) for format in (BOTH, PHASE)]
    assert losses[0] == losses[1]


# -------------------------------------------------------------------------------- refused


def run_refused(use):
    if use == "checkpointing":
        model = build_resharding(PHASE, recompute=False)
        return error_of(lambda: loss_of(model, batch(0)).backward())
    if use == "kept gathered":
        model = build(PHASE, reshard_after_forward=False)
        return error_of(lambda: loss_of(model, batch(0)).backward())
    model = build_resharding(PHASE)
    read = {
        "value": lambda weight: weight + 0,
        "codes": ops.codes,
        "scale_inv": ops.scale_inv,
        "dequantize": ops.dequantize,
        "linear": lambda weight: torch.nn.functional.linear(torch.ones(2, weight.shape[1]), weight),
    }[use]
    errors = []

    def look_in_backward(module, inputs, outputs):
        outputs.register_hook(lambda _: errors.append(error_of(read, module.up.weight.detach())))

    model.blocks[0].register_forward_hook(look_in_backward)
    loss_of(model, batch(0)).backward()
    return errors[0]


USES = ["checkpointing", "kept gathered", "value", "codes", "scale_inv", "dequantize", "linear"]


@pytest.mark.pairwise
@pytest.mark.parametrize("use", USES)
@on_ranks(1, 2, devices=("cpu",))
def test_what_phase_does_not_gather_is_a_named_error(use):
    error = run_refused(use)
    assert 'gather="both"' in error, error


@on_ranks(2, devices=("cpu",))
def test_activation_checkpointing_gathers_both():
    model = build_resharding(BOTH, recompute=False)
    oracle = build_oracle(BOTH, recompute=False, reshard_after_forward=True)
    assert train(model) == train(oracle)
