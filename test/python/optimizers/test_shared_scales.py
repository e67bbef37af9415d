"""quantize_(..., share_tensor_scale=...): weights that engines fuse agree on one tensor scale in the
flush, on any mesh."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from dist_helpers import World, on_worlds
from models import shared_scales
from models.blocks import FusableBlock as Block
from models.shared_scales import GROUPS, RECIPES, build, looks, step
from reference.formats import FORMATS
from reference.layout import Layout
from reference.quantize import quantize
from torch import nn

import qshard
from qshard._runtime.classes import TensorState
from qshard.model import scale_groups

BUDGET_S = 45
ops = torch.ops.qshard


def groups_of(names):
    """Lists of weights that share, among names of parameters."""
    parents = sorted({name.split(".")[0] for name in names})
    return [[f"{p}.{name}.weight" for name in group] for p in parents for group in GROUPS]


def assert_shared(seen):
    for group in groups_of(seen):
        scales = {seen[name][2] for name in group}
        assert len(scales) == 1, (group, scales)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        for part, (a, b) in enumerate(zip(got[name][:2], want[name][:2])):
            assert torch.equal(a, b), (name, part)
        assert got[name][2] == want[name][2], name


def shown_by_oracle(format, values):
    """{name: what codes stand for} of masters, where a group's amax is its largest."""
    members = {name: group for group in groups_of(values) for name in group}
    result = {}
    for name, value in values.items():
        amax = max(values[other].abs().max() for other in members.get(name, [name]))
        layout = Layout.whole(FORMATS[format], *value.shape)
        image, grid = quantize(value, layout, amax=amax.reshape(1))
        result[name] = image[:, : layout.code_bytes], grid
    return result


@pytest.mark.parametrize("format", RECIPES)
def test_codes_are_those_of_the_largest_amax(format):
    model = build(format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    alone = looks(build(format, share=False))
    assert any(alone[n][2] != seen[2] for n, seen in looks(model).items())
    for i in range(3):
        weights = {n: p for n, p in model.named_parameters() if qshard.is_quantized(p)}
        values = {n: p.detach() + 0 for n, p in weights.items()}
        for name, (codes, grid) in shown_by_oracle(format, values).items():
            got = ops.codes(weights[name].detach())
            assert torch.equal(got.view(torch.uint8), codes), (i, name)
        assert_shared(looks(model))
        step(model, optimizer, i)


@on_worlds(1, 2, 3)
@pytest.mark.parametrize("format, sharded, keep_master", [
    ("nvfp4", "before", True),
    ("nvfp4", "after", False),
    ("nvfp4_1x16", "after", True),
    ("float8_tensorwise", "before", False),
])
def test_sharded_is_unsharded(world, format, sharded, keep_master):
    want = World(world.device, 1).run(shared_scales.train, format, keep_master=keep_master)[0]
    for seen in want:
        assert_shared(seen)
    for got in world.run(shared_scales.train, format, sharded, keep_master=keep_master):
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("format", ["nvfp4", "float8_tensorwise"])
def test_tensor_parallel_weights_share_over_all_parts(format):
    want = World("cpu", 1).run(shared_scales.train, format, steps=2, foreach=False)[0]
    for got in World("cpu", 2).run(shared_scales.train_tensor_parallel, format):
        for a, b in zip(got, want, strict=True):
            assert_shared(a)
            for name in b:  # blocks begin anew in each part
                assert torch.equal(a[name][0], b[name][0]) and a[name][2] == b[name][2], name


@pytest.mark.parametrize("keep_master", [True, False])
def test_dcp_round_trip(tmp_path, keep_master):
    saved = World("cpu", 2).run(shared_scales.save, "nvfp4", tmp_path, keep_master=keep_master)[0]
    assert_shared(saved)
    for first, flushed in World("cpu", 3).run(
        shared_scales.load, "nvfp4", tmp_path, keep_master=keep_master
    ):
        assert {n: s[0].shape for n, s in first.items()} == {n: s[0].shape for n, s in saved.items()}
        assert_same(flushed, saved)


def test_flushed_apart_they_meet_later():
    """A step of one weight, a forward, a load: scales of their own, the same on any mesh, until all of
    a group are in one flush."""
    alone, together = shared_scales.apart()
    names = groups_of(alone)[0]
    assert len({alone[name][2] for name in names}) == 2
    assert_shared(together)
    for sharded in ("before", "after"):
        for got in World("cpu", 2).run(shared_scales.apart, sharded):
            assert_same(got[0], alone)
            assert_same(got[1], together)


def test_copies_and_pickles_are_groups_of_their_own():
    model = build("nvfp4")
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        qshard.flush(other)
        with torch.no_grad():
            other[0].k_proj.weight.mul_(10)
        qshard.flush(other)
        assert_shared(looks(other))
        assert scale_groups.of(other[0].q_proj).group is scale_groups.of(other[0].v_proj).group
    before = looks(build("nvfp4"))
    assert_same(looks(model), before)
    qshard.flush(model)
    assert_same(looks(model), before)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@pytest.mark.parametrize("keep_master", [False, True])
def test_copies_share_in_the_step_of_one_optimizer_for_both(way, keep_master):
    model, twin = (build("nvfp4", keep_master=keep_master) for _ in range(2))
    other = way(model)
    assert_same(looks(other), looks(model))
    both = nn.ModuleList([model, other])
    step(twin, torch.optim.AdamW(twin.parameters(), lr=0.05), 0)
    optimizer = torch.optim.AdamW(both.parameters(), lr=0.05)
    for part in both:
        step(part, SimpleNamespace(step=lambda: None), 0)  # gradients alone
    optimizer.step()
    for part in both:
        assert_shared(looks(part))
        assert_same(looks(part), looks(twin))


def test_members_that_are_quantized_again_stay_or_leave():
    model = build("nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = RECIPES["nvfp4"]
    qshard.quantize_(model[0].q_proj, recipe)
    step(model, optimizer, 0)
    assert_shared(looks(model))
    qshard.quantize_(model[0].q_proj, qshard.MXFP8BlockScaling())
    step(model, optimizer, 1)
    k, v = (ops.tensor_scale_inv(m.weight.detach()) for m in (model[0].k_proj, model[0].v_proj))
    assert torch.equal(k, v)
    qshard.quantize_(model, recipe)  # without being asked for
    assert all(scale_groups.of(m) is None for m in model.modules())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign):
    trained = build("nvfp4", keep_master=False)
    step(trained, torch.optim.SGD(trained.parameters(), lr=0.1), 0)
    state_dict = {n: t.detach() + 0 for n, t in trained.state_dict().items()}
    with torch.device("meta" if assign else "cpu"):
        model = nn.Sequential(Block(), Block())
    qshard.quantize_(model, RECIPES["nvfp4"], share_tensor_scale=True, keep_master=False)
    model.load_state_dict(state_dict, assign=assign)
    model(torch.ones(2, 48))
    qshard.flush(model)
    assert_same(looks(model), looks(trained))


def test_moves_keep_it():
    model = build("nvfp4").to(torch.bfloat16)
    step(model, torch.optim.SGD(model.parameters(), lr=0.01), 0)
    assert_shared(looks(model))


def test_wrong_names_of_shared_scales_are_refused():
    model = nn.ModuleDict({n: nn.Linear(16, 16) for n in ("query", "key", "value")})
    recipe = RECIPES["nvfp4"]
    with pytest.raises(ValueError, match="found no linears of one parent.*q_proj/k_proj/v_proj"):
        qshard.quantize_(model, recipe, share_tensor_scale=True)
    assert not qshard.is_quantized(model["key"].weight)
    qshard.quantize_(model, recipe, share_tensor_scale=[("query", "key")])
    scales = {n: ops.tensor_scale_inv(m.weight.detach()).item() for n, m in model.items()}
    assert scales["query"] == scales["key"] != scales["value"]
    with pytest.raises(ValueError, match="share_tensor_scale is for NVFP4.*mxfp8 have no tensor"):
        qshard.quantize_(Block(), qshard.MXFP8BlockScaling(), share_tensor_scale=True)
    with pytest.raises(ValueError, match="no tensor scale of their present values"):
        qshard.quantize_(Block(), qshard.DelayedScaling(), share_tensor_scale=True)
    with pytest.raises(ValueError, match="dynamic weights have no codes"):
        qshard.quantize_(Block(), recipe, share_tensor_scale=True, weights="dynamic")
    with pytest.raises(ValueError, match="needs weights whose format has a scale per tensor"):
        TensorState(ops.quantize(torch.ones(4, 4), "mxfp8")).share_tensor_scale(1, 2)


def test_dequantize_forgets_it():
    model = qshard.dequantize_(build("nvfp4"))
    assert not any("_qshard" in m.__dict__ for m in model.modules())
