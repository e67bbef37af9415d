"""persistent_state=False: a model's state_dict has the plain model's names, and QuantizationState, which
is saved beside it, the rest."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import full_mesh, on_ranks, on_worlds, shared_folder
from models.training import train_by_sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import qshard
from qshard._runtime.classes import TensorState

STATES = {
    "delayed": (qshard.DelayedScaling(amax_history_len=4), {}),
    "stochastic": (qshard.MXFP8BlockScaling(), dict(keep_master=False, stochastic_rounding=True)),
}
states = pytest.mark.parametrize("state", STATES)


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 70), nn.ReLU(), nn.Linear(70, 9))


def build(state, seed=0, **kwargs):
    recipe, options = STATES[state]
    return qshard.quantize_(plain(seed), recipe, persistent_state=False, **options, **kwargs)


def train(model, steps):
    return train_by_sgd(model, steps, features=48, growth=1)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 32, 32)) for _ in range(2))


def mixed():
    """Linears, two of them tied, and parameters of a module of another kind."""
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in "abc"})
    model["b"].weight = model["a"].weight
    model["experts"] = Experts()
    return model


@states
@pytest.mark.parametrize("of", ["all", "one of the tied", "one expert", "nothing"])
def test_another_recipe_leaves_no_state_of_the_one_before(state, of):
    recipe, options = STATES[state]
    model = qshard.quantize_(mixed(), recipe, parameter_fn=lambda p, name: True, **options)
    before = set(model.state_dict())
    parts = {"delayed": ("amax_history", "scaling_amax"), "stochastic": ("rounding",)}[state]
    weights = ("a.weight", "b.weight", "c.weight", "experts.up", "experts.down")
    assert before == {*mixed().state_dict(), *(f"{w}_{part}" for w in weights for part in parts)}
    if of == "nothing":
        with pytest.raises(ValueError, match="multiple of 32 rows"):
            model["d"] = nn.Linear(32, 48)
            qshard.quantize_(model, qshard.MXFP8BlockScaling(weight_block=(1, 32)))
        assert set(model.state_dict()) == {*before, "d.weight", "d.bias"}
        return
    gone = {"all": weights, "one of the tied": weights[:2], "one expert": weights[3:4]}[of]
    qshard.quantize_(
        model,
        qshard.Float8CurrentScaling(),
        filter_fn=lambda module, name: of == "all" or of == "one of the tied" and name == "a",
        parameter_fn=lambda p, name: of == "all" or of == "one expert" and name == "experts.up",
    )
    left = before - {f"{w}_{part}" for w in gone for part in parts}
    assert set(model.state_dict()) == {name for name, _ in names_of(model)} == left
    assert set(qshard.dequantize_(model).state_dict()) == set(mixed().state_dict())


def names_of(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@states
def test_state_dicts_have_the_names_of_plain_models(state):
    model = build(state)
    assert list(model.state_dict()) == list(plain().state_dict())
    assert model.load_state_dict(plain(1).state_dict()) == ([], [])
    meta = build(state).to("meta")
    assert meta.load_state_dict(plain(1).state_dict(), assign=True) == ([], [])
    names = qshard.QuantizationState(model).state_dict().keys()
    assert names and all(name.startswith(("0.weight_", "2.weight_")) for name in names)
    assert not qshard.QuantizationState(qshard.dequantize_(model)).state_dict()


@states
def test_saved_beside_the_model_it_resumes_bit_for_bit(state, tmp_path):
    model = build(state)
    train(model, range(3))
    beside = qshard.QuantizationState(model)
    torch.save(beside.state_dict(), tmp_path / "state.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = build(state, seed=1)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    qshard.QuantizationState(other).load_state_dict(torch.load(tmp_path / "state.pt"))
    assert train(model, range(3, 6)) == train(other, range(3, 6))


MODULES = {
    "LayerNormMLP": lambda: qshard.nn.LayerNormMLP(48, 64),
    "parts": lambda: qshard.nn.Linear(48, 48, parameters_split=("q_", "k_")),
}


@pytest.mark.parametrize("kind", MODULES)
def test_weights_of_other_names_resume_bit_for_bit(kind):
    def build(seed):
        torch.manual_seed(seed)
        return qshard.quantize_(MODULES[kind](), STATES["delayed"][0], persistent_state=False)

    model, other = build(0), build(1)
    train(model, range(3))
    other.load_state_dict(model.state_dict())
    qshard.flush(other)  # codes of the loaded weights, by a scale of the state before
    saved = qshard.QuantizationState(model).state_dict()
    assert len(saved) >= 4
    qshard.QuantizationState(other).load_state_dict(saved)
    assert train(model, range(3, 6)) == train(other, range(3, 6))


def test_wrong_states_are_refused_before_anything_is_changed():
    model = build("delayed")
    train(model, range(2))
    beside = qshard.QuantizationState(model)
    good = {name: tensor.clone() for name, tensor in beside.state_dict().items()}
    last = list(good)[-1]
    changed = {name: tensor + 1 for name, tensor in good.items()}
    for wrong, message in [
        ({n: t for n, t in changed.items() if n != last}, f"{last} is missing"),
        ({**changed, "4.weight_amax_history": torch.zeros(1)}, "4.weight_amax_history is unexpected"),
        ({**changed, last: torch.zeros(7)}, rf"{last} has shape .* and \(7,\)"),
        ({**changed, last: "text"}, rf"{last} has shape .* and \(\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            beside.load_state_dict(wrong)
    assert all(torch.equal(t, good[n]) for n, t in beside.state_dict().items())


def resume(state, path):
    def sharded(seed):
        model = build(state, seed)
        fully_shard(model[0], mesh=full_mesh())
        return fully_shard(model, mesh=full_mesh())

    model = sharded(0)
    train(model, range(3))
    dcp.save({"model": model.state_dict(), "qshard": qshard.QuantizationState(model)}, checkpoint_id=path)
    other = sharded(1)
    loaded = {"model": other.state_dict(), "qshard": qshard.QuantizationState(other)}
    dcp.load(loaded, checkpoint_id=path)
    assert train(model, range(3, 6)) == train(other, range(3, 6))


@states
@on_ranks(2, devices=("cpu",))
def test_dcp_saves_and_loads_it_beside_a_sharded_model(state):
    with shared_folder() as path:
        resume(state, str(path))
        dist.barrier()


def experts_on(mesh, count, is_sharded, seed, is_persistent=False):
    """Stacks of which each rank of the mesh's second dimension has some; the later, the larger."""
    torch.manual_seed(seed)
    model = Experts()
    for name in ("up", "down"):
        stack = torch.randn(count, 32, 32) * torch.arange(1, count + 1).view(-1, 1, 1)
        setattr(model, name, nn.Parameter(distribute_tensor(stack, mesh["ep"], [Shard(0)])))
    recipe, options = STATES["delayed"]
    options = {**options, "persistent_state": is_persistent, "tp_mesh": mesh["ep"]}
    qshard.quantize_(model, recipe, parameter_fn=lambda *_: True, **options)
    if is_sharded:
        fully_shard(model, mesh=mesh["efsdp"])
    return model


def states_of_ranks(model):
    parameters = dict(model.named_parameters()).items()
    states = {name: TensorState(p._local_tensor).scaling_state() for name, p in parameters}
    return {f"{name}_{part}": t * 1 for name, parts in states.items() for part, t in parts.items()}


def beside_the_model(model, other, folder):
    dcp.save({"state": qshard.QuantizationState(model)}, checkpoint_id=folder)
    dcp.load({"state": qshard.QuantizationState(other)}, checkpoint_id=folder)


def in_the_model(model, other, folder, **kwargs):
    dcp.save(model.state_dict(), checkpoint_id=folder)
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict({name: value.clone() for name, value in loaded.items()}, **kwargs)


def assigned(model, other, folder):
    in_the_model(model, other, folder, assign=True)


def resume_experts(shape, count, is_sharded, save_and_load):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
    is_persistent = save_and_load is not beside_the_model
    model = experts_on(mesh, count, is_sharded, 0, is_persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0 + 1
        optimizer.step()
    saved = states_of_ranks(model)
    with shared_folder() as folder:
        other = experts_on(mesh, count, is_sharded, 1, is_persistent)
        save_and_load(model, other, folder)
    loaded = states_of_ranks(other)
    assert saved.keys() == loaded.keys() and len(saved) == 4
    return [name for name in saved if not torch.equal(saved[name], loaded[name])]


@pytest.mark.parametrize("save_and_load", [beside_the_model, in_the_model, assigned])
@pytest.mark.parametrize(
    "shape, count, is_sharded", [((1, 2), 4, True), ((1, 2), 5, False), ((2, 1), 4, True)]
)
@on_worlds(2, devices=("cpu",))
def test_ranks_of_an_expert_mesh_load_the_states_of_their_own_experts(
    world, shape, count, is_sharded, save_and_load
):
    assert world.run(resume_experts, shape, count, is_sharded, save_and_load) == [[], []]
