"""Delayed scaling: the history rolls once per optimizer step that ran, and is part of checkpoints."""

import copy
import io

import pytest
import torch
from helpers import bits, ops, pickled, value, weight
from models.training import adamw
from reference.delayed_scaling import DelayedScaling
from reference.formats import FORMATS
from reference.layout import Layout
from reference.quantize import quantize
from torch import nn

import qshard
from qshard._runtime.classes import TensorState

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INPUT, GRADIENT = 1, 2  # rows of the tables; the weight's is 0


def flush_step(*weights, found_inf=None):
    ops._flush_after_step(list(weights), [0] * len(weights), [False] * len(weights), found_inf)


def state_of(q):
    return {name: tensor.cpu().clone() for name, tensor in TensorState(q).scaling_state().items()}


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------- against the oracle


VALUES = [2.0, 0.5, 0.25, 3.0, float("inf"), 0.125, 0.0, float("nan"), 1e-30, 3e38, 1.0, 1.0, 0.1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("length,margin,most_recent", [(4, 0, False), (1, 2, False), (3, 1, True)])
def test_codes_and_tables_follow_the_oracle(length, margin, most_recent, keep_master, device):
    oracle = DelayedScaling(length, margin, most_recent)
    options = f"margin={margin},history={length}" + (",most_recent" if most_recent else "")
    x = weight(33, 20)
    q = ops.quantize(x.to(device), f"float8_delayed[{options}]", keep_master=keep_master)
    layout = Layout.whole(FORMATS["float8_delayed"], 33, 20)
    amax = oracle.flush(x.abs().max().item())
    for step, largest in enumerate(VALUES):
        image, grid = quantize(x, layout, amax=torch.tensor([amax]))
        assert torch.equal(ops.codes(q).view(torch.uint8).cpu(), image[:, :20]), step
        assert torch.equal(ops.scale_inv(q).cpu(), grid)
        tables = state_of(q)
        assert tables["amax_history"][0].tolist() == pytest.approx(oracle.history, nan_ok=True)
        assert tables["scaling_amax"][0, 0] == oracle.amax_in_use
        assert tables["scaling_amax"][0, 1] == oracle.amax_next
        x = weight(33, 20, seed=step + 1)
        x[0, 0] = x.nan_to_num().abs().max() if largest == 1.0 else largest
        q.copy_(x.to(device))
        flush_step(q)
        amax = oracle.step(torch.where(x.isnan().any(), float("nan"), x.abs().max()).item())


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_scales_by_earlier_steps_and_other_writes_by_their_own(device):
    q = ops.quantize(torch.full((4, 4), 2.0, device=device), "float8_delayed", keep_master=True)
    q.fill_(8.0)
    flush_step(q)
    assert ops.scale_inv(q).item() == pytest.approx(2 / 448)
    assert (ops.dequantize(q) == 2).all()  # saturated: the scale is that of the step before
    flush_step(q)  # nothing was written
    assert ops.scale_inv(q).item() == pytest.approx(2 / 448)
    history = state_of(q)["amax_history"]
    q.fill_(32.0)  # a user's write
    assert ops.scale_inv(q).item() == pytest.approx(32 / 448)
    assert torch.equal(state_of(q)["amax_history"], history)
    q.fill_(16.0)
    flush_step(q)
    assert ops.scale_inv(q).item() == pytest.approx(8 / 448)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_write_before_a_step_has_scales_of_its_own_once_it_is_flushed(flushed):
    """Documented: else the step counts as what made the values, and clips one time."""
    weight = nn.Parameter(ops.quantize(torch.full((4, 4), 2.0), "float8_delayed", keep_master=True))
    model, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(4, 4)
    with torch.no_grad():
        weight.fill_(8.0)
    if flushed:
        qshard.flush(model)
    optimizer.step()
    assert (ops.dequantize(weight.detach()) == (8 if flushed else 2)).all()
    assert (value(weight.detach()) == 8).all()
    optimizer.step()
    assert (ops.dequantize(weight.detach()) == 8).all()


@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("rows", [(0, 6), (6, 10), (0, 10)], ids=str)
def test_reading_a_shard_alone_leaves_the_state_that_ranks_share(rows, keep_master):
    """What a rank makes of its own rows, the next step must not scale by: its peers have others."""
    whole = ops.quantize(weight(10, 4), "float8_delayed", keep_master=keep_master)
    shard = whole.new_zeros(rows[1] - rows[0], 4).copy_(whole[rows[0] : rows[1]])
    before = state_of(shard)
    shard.mul_(8)
    amax = value(shard).abs().max().item()
    assert ops.scale_inv(shard).item() == pytest.approx(amax / 448)
    assert same_state(state_of(shard), before)
    assert value(shard).abs().max().item() == amax


# ------------------------------------------------------------------------------- training


def build(seed=0, **recipe):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))
    return qshard.quantize_(model, qshard.DelayedScaling(amax_history_len=4, **recipe))


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    loss = model(torch.randn(5, 24, generator=generator) * (number + 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_histories_of_weight_input_and_gradient():
    model = build()
    optimizer, weights, inputs = adamw(model), [], []
    for number in range(6):
        step(model, optimizer, number)
        weights.append(value(model[0].weight).abs().max().item())
        generator = torch.Generator().manual_seed(number)
        inputs.append((torch.randn(5, 24, generator=generator) * (number + 1)).abs().max().item())
    tables = state_of(model[0].weight)
    assert tables["amax_history"][0].tolist() == pytest.approx([0, *weights[-3:]])
    assert tables["amax_history"][INPUT].tolist() == pytest.approx([0, *inputs[-3:]])
    assert (tables["amax_history"][GRADIENT, 1:] > 0).all()
    assert tables["scaling_amax"][INPUT, 0] == max(inputs[-4:])


def test_the_largest_of_all_micro_batches_counts():
    model = build()
    for factor in (1.0, 5.0, 2.0):
        model(torch.full((2, 24), factor)).sum().backward()
    assert state_of(model[0].weight)["amax_history"][INPUT, 0] == 5
    model(torch.full((2, 24), float("inf")))
    assert state_of(model[0].weight)["amax_history"][INPUT, 0] == 5


def test_weight_only_collects_nothing():
    model = nn.Linear(24, 8)
    qshard.quantize_(model, qshard.DelayedScaling(), weight_only=True)
    model(torch.randn(3, 24)).sum().backward()
    assert not state_of(model.weight)["amax_history"].any()


def test_every_argument_acts():
    recipe = qshard.DelayedScaling(2, "E4M3", 16, "most_recent")
    assert recipe.format == "float8_delayed[margin=2,history=16,most_recent,e4m3]"
    model = qshard.quantize_(nn.Linear(8, 8), recipe)
    assert state_of(model.weight)["amax_history"].shape == (3, 16)
    largest = value(model.weight).abs().max().item()
    assert ops.scale_inv(model.weight).item() == pytest.approx(4 * largest / 448)
    for wrong in (dict(fp8_format="E5M2"), dict(amax_compute_algo="mean")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            qshard.DelayedScaling(**wrong)
    for wrong in (dict(margin=-1), dict(amax_history_len=0)):
        with pytest.raises(ValueError, match="known options"):
            qshard.quantize_(nn.Linear(8, 8), qshard.DelayedScaling(**wrong))


# -------------------------------------------------------------------- when nothing must roll


def test_steps_that_gradscaler_skips_roll_nothing():
    """Fused optimizers are called and told; others are not called."""
    for fused in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        for factor, rolls in ((1.0, True), (float("inf"), False), (1.0, True)):
            before, codes = state_of(model[0].weight), ops.codes(model[0].weight).float()
            loss = model(torch.ones(2, 24)).sum()
            (scaler.scale(loss) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = state_of(model[0].weight)
            rolled = not torch.equal(before["amax_history"][0], after["amax_history"][0])
            assert rolled == rolls, (fused, factor)
            if not rolls:
                assert torch.equal(ops.codes(model[0].weight).float(), codes)


class Container(torch.optim.Optimizer):
    """An optimizer that steps others, as torchtitan's OptimizersContainer, and then writes too."""

    def __init__(self, params, pull=0.0):
        params = list(params)
        super().__init__(params, {})
        self.pull, self.fails = pull, False
        self.optimizers = [torch.optim.AdamW([param], lr=1e-2) for param in params]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            if self.fails:
                raise KeyError("in step")
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if self.pull:
                        param.mul_(1 - self.pull)


def test_a_step_within_a_step_is_one_step():
    plain, model = build(), build()
    container = Container(model.parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for i in range(3):
        step(plain, optimizer, i)
        step(model, container, i)
        assert same_state(state_of(plain[0].weight), state_of(model[0].weight))
    # An outer step that failed leaves nothing behind.
    container.fails = True
    with pytest.raises(KeyError):
        step(model, container, 3)
    container.fails = False
    container.zero_grad()
    before = state_of(model[2].weight)["amax_history"][0, -3:]
    step(model, container, 4)
    after = state_of(model[2].weight)["amax_history"][0, -3:]
    assert torch.equal(before[1:], after[:-1])


def test_what_an_outer_step_writes_is_quantized_and_rolls_nothing():
    model = build()
    container = Container(model.parameters(), pull=0.5)
    for i in range(3):
        step(model, container, i)
        weight = model[0].weight.detach()
        with torch.no_grad():
            want = model[0].weight * 1  # the master
        assert torch.allclose(ops.dequantize(weight), want, rtol=0.07, atol=1e-3)
    history = state_of(model[0].weight)["amax_history"][0]
    assert history.count_nonzero() == 3


def test_loads_flushes_and_reads_roll_nothing():
    model = build()
    step(model, adamw(model), 0)
    before = state_of(model[0].weight)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    qshard.flush(model)
    ops.codes(model[0].weight)
    assert same_state(state_of(model[0].weight), before)


# --------------------------------------------------------------------------------- copies


def resumed_by_state_dict(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(seed=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def resumed_by_assignment(model):
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))
    qshard.quantize_(other, qshard.DelayedScaling(amax_history_len=4))
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return other


def resumed_by_to_empty(model):
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))
    qshard.quantize_(other, qshard.DelayedScaling(amax_history_len=4)).to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, pickled, resumed_by_state_dict, resumed_by_assignment, resumed_by_to_empty],
    ids=lambda way: way.__name__,
)
def test_training_goes_on_bit_for_bit(way):
    model = build()
    optimizer = adamw(model)
    for number in range(3):
        step(model, optimizer, number)
    other = way(model)
    other_optimizer = adamw(other)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 6):
        assert torch.equal(bits(ops.codes(model[0].weight)), bits(ops.codes(other[0].weight)))
        assert same_state(state_of(model[0].weight), state_of(other[0].weight))
        assert step(model, optimizer, number) == step(other, other_optimizer, number)
    assert same_state(state_of(model[2].weight), state_of(other[2].weight))


def test_state_of_a_copy_is_its_own():
    q = ops.quantize(weight(8, 8), "float8_delayed", keep_master=True)
    clone, before = q.clone(), state_of(q)
    clone.mul_(3)
    flush_step(clone)
    assert same_state(state_of(q), before) and not same_state(state_of(clone), before)
