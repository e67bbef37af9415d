"""accelerate on two ranks, FSDP2 and DDP: quantize_ before and after prepare, clipping, save_state and
load_state, cpu_ram_efficient_loading, get_state_dict, save_model."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from client_models import RECIPES, assert_near, batch, compiling, llama
from client_worlds import accelerator
from dist_helpers import on_ranks, on_worlds, shared_folder
from models.weights import different, local_values
from safetensors.torch import load_file

import qshard

BUDGET_S = 60


def prepared(made, recipe, order, seed=0, dtype=torch.float32, **kwargs):
    model = llama(seed=seed).to(dtype)
    if order == "quantize prepare":
        qshard.quantize_(model, RECIPES[recipe], **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    if order == "prepare quantize":
        qshard.quantize_(model, RECIPES[recipe], **kwargs)
    return model, optimizer


def train(made, model, optimizer, steps):
    losses = []
    for number in steps:
        loss = model(**batch(2 * number + dist.get_rank())).loss
        made.backward(loss)
        norm = made.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), float(norm)))
    return losses


masters = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
recipes = pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])


@masters
@recipes
@on_ranks(2, devices=("cpu",))
def test_prepare_save_state_and_load_state(recipe, keep_master):
    values = []
    # accelerate's prepare maps parameters by address, which weights without a master have not.
    orders = ("quantize prepare", "prepare quantize")[0 if keep_master else 1 :]
    for order in orders:
        with accelerator() as made, shared_folder() as folder:
            assert made.is_fsdp2
            model, optimizer = prepared(made, recipe, order, keep_master=keep_master)
            losses = train(made, model, optimizer, range(2))
            made.save_state(str(folder))
            losses += train(made, model, optimizer, range(2, 4))
            values.append((losses, local_values(model)))
            made.load_state(str(folder))
            assert train(made, model, optimizer, range(2, 4)) == losses[2:]
            assert not different(values[-1][1], local_values(model))
    assert values[0][0] == values[-1][0]
    assert not different(values[0][1], values[-1][1])


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@recipes
@on_ranks(2, devices=("cpu",))
def test_cpu_ram_efficient_loading(recipe, state_dict_type):
    """Rank 0 alone has the weights that are trained, as from_pretrained leaves them."""
    results = []
    for efficient, order in [
        (False, "quantize prepare"), (True, "quantize prepare"), (True, "prepare quantize"),
    ]:
        plugin = dict(cpu_ram_efficient_loading=efficient, state_dict_type=state_dict_type)
        with accelerator(**plugin) as made, shared_folder() as folder:
            seed = dist.get_rank() if efficient else 0
            model, optimizer = prepared(made, recipe, order, seed, persistent_state=False)
            made.register_for_checkpointing(qshard.QuantizationState(model))
            losses = train(made, model, optimizer, range(2))
            made.save_state(str(folder))
            losses += train(made, model, optimizer, range(2, 4))
            results.append((losses, local_values(model)))
            made.load_state(str(folder))
            assert train(made, model, optimizer, range(2, 4)) == losses[2:]
            assert not different(results[-1][1], local_values(model))
    for losses, values in results[1:]:
        assert losses == results[0][0] and not different(values, results[0][1])


@pytest.mark.parametrize(
    "recipe, dtype",
    [
        ("float8_blockwise", torch.float32),
        ("float8_delayed", torch.float32),
        ("float8_blockwise", torch.bfloat16),
    ],
)
@on_ranks(2, devices=("cpu",))
def test_mixed_precision_of_accelerate_keeps_weights_quantized(recipe, dtype):
    """accelerate gives parameters that are trained fp32, by param.data = param.data.to(float32)."""
    results = []
    for order in ("quantize prepare", "prepare quantize"):
        with accelerator(mixed_precision="bf16") as made:
            if dtype == torch.bfloat16 and order == "quantize prepare":
                with pytest.raises(RuntimeError, match=r"x\.data = y would put a plain"):
                    prepared(made, recipe, order, dtype=dtype)
                continue
            model, optimizer = prepared(made, recipe, order, dtype=dtype)
            assert all(p.dtype == torch.float32 for p in model.parameters())
            assert sum(map(qshard.is_quantized, model.parameters())) == 15
            results.append((train(made, model, optimizer, range(2)), local_values(model)))
    assert results[0][0] == results[-1][0] and not different(results[0][1], results[-1][1])


@on_ranks(2, devices=("cpu",))
def test_limits_of_prepare():
    """accelerate broadcasts persistent buffers as if they were parameters, whosever they are; and asks
    for addresses."""
    with accelerator(cpu_ram_efficient_loading=True) as made:
        with pytest.raises(AttributeError, match="device_mesh"):
            prepared(made, "float8_delayed", "quantize prepare")
    with accelerator() as made:
        with pytest.raises(RuntimeError, match="without a master"):
            prepared(made, "float8_blockwise", "quantize prepare", keep_master=False)


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
@recipes
@on_ranks(2, devices=("cpu",))
def test_get_state_dict_and_save_model(recipe, mode):
    with accelerator(mode) as made, shared_folder() as folder:
        model, optimizer = prepared(made, recipe, "quantize prepare")
        train(made, model, optimizer, range(2))
        state = made.get_state_dict(model)
        made.save_model(model, str(folder), max_shard_size="16KB")
        dist.barrier()
        plain = llama(seed=1)
        if dist.get_rank() == 0:  # accelerate gives FSDP2's to rank 0 alone
            assert all(type(tensor) is torch.Tensor for tensor in state.values())
            missing, unexpected = plain.load_state_dict(state, strict=False)
            assert not missing and all("weight_" in name for name in unexpected)
        files = list(folder.glob("*.safetensors"))
        read = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert len(files) > 1
        full = {n: p.full_tensor() if mode == "fsdp2" else p * 1 for n, p in model.named_parameters()}
        for name, value in full.items():
            name = name.removeprefix("module.")
            assert torch.equal(read[name], value), name
            assert dist.get_rank() or torch.equal(plain.get_parameter(name), value), name


def run_ddp(recipe):
    with accelerator("ddp") as made, shared_folder() as folder:
        model, optimizer = prepared(made, recipe, "quantize prepare")
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        losses = train(made, model, optimizer, range(2))
        made.save_state(str(folder))
        made.wait_for_everyone()
        losses += train(made, model, optimizer, range(2, 4))
        values = local_values(model)
        made.load_state(str(folder))
        assert train(made, model, optimizer, range(2, 4)) == losses[2:]
        assert not different(values, local_values(model))
        return values


@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(2, devices=("cpu",))
def test_replicas_of_accelerate_stay_the_same(world, recipe):
    first, second = world.run(run_ddp, recipe)
    assert not different(first, second)


@pytest.mark.takes_a_minute
@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
@on_ranks(2, devices=("cpu",), compiles=True)
def test_compiled_models_train_as_eager_ones(mode):
    losses = []
    for context in (contextlib.nullcontext(), compiling()):
        with accelerator(mode) as made, context:
            model, optimizer = prepared(made, "float8_delayed", "quantize prepare")
            if losses:
                model = torch.compile(model, backend="inductor")
            losses.append(train(made, model, optimizer, range(2)))
    assert_near(*losses)


@on_ranks(2, devices=("cpu",))
def test_quantize_after_ddp_is_a_named_error():
    with accelerator("ddp") as made:
        with pytest.raises(RuntimeError, match="call quantize_ before DistributedDataParallel"):
            prepared(made, "float8_blockwise", "prepare quantize")
