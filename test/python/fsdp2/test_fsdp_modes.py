"""FSDP2's modes: each trains as stock FSDP2 trains plain fp32 parameters with the same arithmetic.

On CPU that is checked bit for bit, losses and masters, against `build_oracle`. On CUDA activations
are quantized too, so there modes are compared with each other.
"""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from dist_helpers import device, error_of, full_mesh, on_ranks, on_worlds
from helpers import has_two_images, ops, quantized_alike, shown_to_dgrad
from models.blocks import WIDTH, Block, Model
from models.formats import FORMATS, MIXES, RECIPES, format_of, quantize_model
from models.fsdp2 import build, build_oracle, shard
from models.plain_twins import LinearOfTwoValues, Shadow, make_plain, plain_linear
from models.training import adamw, batch, loss_of, train
from models.weights import check_gathered, different, local, local_values, quantized_parameters
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import qshard

BUDGET_S = 75

# --------------------------------------------------------------------------------- modes


@dataclass(frozen=True)
class Mode:
    build: dict = field(default_factory=dict)
    train: dict = field(default_factory=dict)


ACCUMULATE = dict(microbatches=2)
ACCUMULATE_LOCALLY = dict(microbatches=2, synced=False)
KEEP = dict(reshard_after_forward=False)
BF16 = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

# The first of a group is what the others, which compute the same, are compared with.
MODES = {
    "plain": Mode(),
    "plain/keep-gathered": Mode(KEEP),
    "plain/recompute": Mode(dict(recompute=False)),
    "plain/recompute-reentrant": Mode(dict(recompute=True)),
    "plain/keep-gathered-recompute": Mode(KEEP | dict(recompute=False)),
    "accumulate": Mode(train=ACCUMULATE),
    "accumulate/keep-gathered": Mode(KEEP, ACCUMULATE),
    "accumulate/recompute": Mode(dict(recompute=False), ACCUMULATE),
    "accumulate/no-reshard": Mode(train=ACCUMULATE | dict(resharded=False)),
    "accumulate-locally": Mode(train=ACCUMULATE_LOCALLY),
    "accumulate-locally/no-reshard": Mode(train=ACCUMULATE_LOCALLY | dict(resharded=False)),
    "accumulate-locally/recompute": Mode(dict(recompute=True), ACCUMULATE_LOCALLY),
    "bf16": Mode(BF16),
    "bf16/keep-gathered": Mode(BF16 | KEEP),
    "bf16/recompute": Mode(BF16 | dict(recompute=False)),
}


def run_mode(name, format, keep_master, rows):
    mode, base = MODES[name], MODES[name.split("/")[0]]
    model = build(format, keep_master=keep_master, rows=rows, **mode.build)
    losses = train(model, **mode.train)
    assert check_gathered(model) == 5

    twin = build(format, keep_master=keep_master, rows=rows, **base.build)
    assert train(twin, **base.train) == losses
    if keep_master:
        assert not different(local_values(model), local_values(twin))
    if keep_master and device().type == "cpu" and "mp_policy" not in mode.build:
        oracle = build_oracle(format, rows=rows, **mode.build)
        assert train(oracle, **mode.train) == losses
        assert not different(local_values(model), local_values(oracle))
    return losses


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("name", MODES)
@on_worlds(2)
def test_a_mode_trains_as_stock_fsdp2(world, name, format, keep_master):
    losses = world.run(run_mode, name, format, keep_master, 257)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [3, 33])
@pytest.mark.parametrize("name", ["plain", "accumulate/no-reshard", "plain/recompute-reentrant"])
@on_ranks(1, 3, 4)
def test_a_mode_with_few_rows_trains_as_stock_fsdp2(name, rows):
    """3 rows on 4 ranks leave one rank empty, 33 rows cut a block."""
    run_mode(name, "float8_blockwise", True, rows)


# ------------------------------------------------------------------------ mixed precision


class LinearOfStoredValues(torch.nn.Linear):
    def forward(self, x):
        return LinearOfTwoValues.apply(x, self.weight, self.dgrad_weight, self.bias)


@pytest.mark.parametrize("format", MIXES)
@on_ranks(2, devices=("cpu",))
def test_bf16_compute_with_fp32_reduction_is_exact(format):
    """bf16 compute with fp32 reduction, against the same in plain autograd: a sum over two ranks has
    one order only, so this is exact."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = build(format, mp_policy=policy)
    losses = train(model)
    assert check_gathered(model) == 5

    torch.manual_seed(0)
    plain = Model(format=format).to(device())
    shadows = {name: Shadow(format_of(format, name)) for name in quantized_parameters(model)}
    optimizer, oracle_losses = adamw(plain), []
    for step in range(3):
        for rank in range(2):
            params = {
                name: (shadows[name](p) if name in shadows else p).bfloat16()
                for name, p in plain.named_parameters()
            }
            for name, shadow in shadows.items():
                if has_two_images(shadow.format):
                    linear = plain.get_submodule(name.removesuffix(".weight"))
                    linear.dgrad_weight = shown_to_dgrad(shadow.quantized).bfloat16()
                    linear.__class__ = LinearOfStoredValues
            x = batch(step, rank=rank)
            y = torch.func.functional_call(plain, params, (x.bfloat16(),))
            loss = (y - x).float().square().mean()
            (loss / 2).backward()
            if rank == dist.get_rank():
                oracle_losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == oracle_losses
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().full_tensor(), plain.get_parameter(name)), name


# ------------------------------------------------------------------------------------ HSDP


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
@on_ranks(4)
def test_hsdp_trains_as_stock_fsdp2(shape, format, keep_master):
    mesh = full_mesh(*shape, names=("replicate", "shard"))
    model = build(format, mesh=mesh, keep_master=keep_master)
    losses = train(model)
    assert check_gathered(model) == 5
    if keep_master and device().type == "cpu":
        oracle = build_oracle(format, mesh=mesh)
        assert train(oracle) == losses
        assert not different(local_values(model), local_values(oracle))


# --------------------------------------------------------- which parameters are quantized


def run_prepared(format, prepare, oracle_prepare):
    torch.manual_seed(0)
    model = shard(prepare(Model(format=format).to(device()), format))
    losses = train(model)
    checked = check_gathered(model)
    torch.manual_seed(0)
    oracle = shard(oracle_prepare(Model(format=format).to(device()), format))
    if device().type == "cpu":
        assert train(oracle) == losses
        assert not different(local_values(model), local_values(oracle))
    return checked


def freeze(model):
    for weight in (model.blocks[0].up.weight, model.blocks[1].down.weight, model.head.weight):
        weight.requires_grad_(False)
    return model


def quantize_then_freeze(model, format):
    return freeze(quantize_model(model, format))


def freeze_then_quantize(model, format):
    return quantize_model(freeze(model), format)


def frozen_plain(model, format):
    return freeze(make_plain(model, format))


@pytest.mark.pairwise
@pytest.mark.parametrize("prepare", [quantize_then_freeze, freeze_then_quantize])
@pytest.mark.parametrize("format", MIXES)
@on_ranks(2)
def test_frozen_parameters_train_as_in_stock_fsdp2(format, prepare):
    assert run_prepared(format, prepare, frozen_plain) == 5


def quantize_by_name(model, _):
    """Both formats, with and without a master, and a plain weight."""
    tensorwise, blockwise = RECIPES["float8_tensorwise"], RECIPES["float8_blockwise"]
    qshard.quantize_(model, tensorwise, filter_fn=lambda _, name: name.endswith("up"))
    return qshard.quantize_(model, blockwise, filter_fn=lambda _, name: name.endswith("down"))


def plain_by_name(model, _):
    for block in model.blocks:
        block.up.__class__ = plain_linear("float8_tensorwise")
        block.down.__class__ = plain_linear("float8_blockwise")
    return model


@on_ranks(1, 2, 3)
def test_formats_and_plain_weights_in_one_group():
    assert run_prepared(None, quantize_by_name, plain_by_name) == 4


class TiedModel(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.embedding = nn.Embedding(257, WIDTH)
        self.block = Block(64, linear)
        self.head = linear(WIDTH, 257, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


class PlainTiedModel(TiedModel):
    def __init__(self, format):
        super().__init__()
        make_plain(self, format)
        self.shadow = Shadow(format_of(format, "head"))

    def forward(self, tokens):
        weight = self.shadow(self.embedding.weight)
        return self.head(self.block(nn.functional.embedding(tokens, weight)))


def train_on_tokens(model):
    optimizer, losses = adamw(model), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(257, (32,), generator=generator).to(device())
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_a_tied_embedding_trains_as_in_stock_fsdp2(format):
    torch.manual_seed(0)
    model = quantize_model(TiedModel().to(device()), format)
    fully_shard(model, mesh=full_mesh())
    assert model.head.weight is model.embedding.weight
    losses = train_on_tokens(model)
    assert model.head.weight is model.embedding.weight
    assert check_gathered(model) == 3
    torch.manual_seed(0)
    oracle = fully_shard(PlainTiedModel(format).to(device()), mesh=full_mesh())
    if device().type == "cpu":
        assert train_on_tokens(oracle) == losses
        assert not different(local_values(model), local_values(oracle))


# ------------------------------------------------------------- quantized after fully_shard


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("format", MIXES)
@on_ranks(2, 3)
def test_quantizing_after_fully_shard_trains_as_before_it(format, keep_master):
    torch.manual_seed(0)
    model = quantize_model(shard(Model(format=format).to(device())), format, keep_master=keep_master)
    losses = train(model)
    assert check_gathered(model) == 5
    twin = build(format, keep_master=keep_master)
    assert train(twin) == losses


# ------------------------------------------------------------------------------------- DDP


@pytest.mark.parametrize("format", MIXES)
@on_ranks(2)
def test_ddp_trains_as_with_plain_weights(format):
    def replicated(prepare):
        torch.manual_seed(0)
        return DistributedDataParallel(prepare(Model(format=format).to(device()), format))

    model = replicated(quantize_model)
    losses = train(model)
    for name, weight in quantized_parameters(model).items():
        again = quantized_alike(ops.master(weight.detach()).clone(), weight)
        assert torch.equal(ops.dequantize(weight.detach()), ops.dequantize(again)), name
    if device().type == "cpu":
        oracle = replicated(make_plain)
        assert train(oracle) == losses
        assert not different(local_values(model), local_values(oracle))


# -------------------------------------------------------------------------------- refused


def first_forward_error(**kwargs):
    model = build("float8_blockwise", **kwargs)
    return error_of(loss_of, model, batch(0))


def sharding_error(**kwargs):
    return error_of(build, "float8_blockwise", **kwargs)


def shard_dim_1(param):
    return torch.distributed.tensor.Shard(1 if param.dim() > 1 else 0)


@on_ranks(4)
def test_partial_reshard_is_refused():
    error = first_forward_error(reshard_after_forward=2)
    assert "NotImplementedError: qshard: reshard_after_forward=<int>" in error


@on_ranks(2)
def test_sharding_columns_is_refused():
    # FSDP2 wants even shards in other dimensions than 0.
    error = sharding_error(rows=256, shard_placement_fn=shard_dim_1)
    assert "NotImplementedError: qshard: this quantized parameter is sharded by" in error
    assert "Return Shard(0) from shard_placement_fn" in error


@on_ranks(1, 2)
def test_quantizing_after_the_first_forward_is_refused():
    model = shard(Model().to(device()))
    loss_of(model, batch(0)).backward()
    error = error_of(qshard.quantize_, model, RECIPES["float8_blockwise"])
    assert not quantized_parameters(model)
    loss_of(model, batch(1)).backward()
    assert "RuntimeError: qshard.quantize_: this model has run a forward" in error


@on_ranks(1, 2, 4)
def test_views_before_the_first_use_stay_views():
    """Rows of every rank but the last; of the last a padded shard, and at 4 ranks none."""
    model = nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 3, bias=False)).to(device())
    shard(model)
    qshard.quantize_(model, qshard.Float8BlockScaling())
    parameters = list(quantized_parameters(model).values())
    views = [local(param).detach() for param in parameters]
    model(torch.ones(2, 40, device=device()))
    model.reshard()
    for param, view in zip(parameters, views):
        view.fill_(0.5)
        assert (local(param).detach() * 1 == 0.5).all()
    check_gathered(model)
