"""What loading the library does to others: nothing at all where the key is taken, nothing to their
tensors, models and checkpoints where it is not."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import ops
from torch.distributed.checkpoint.api import CheckpointException

import qshard

# How another library may have come first, and what of it the message is to name.
TAKEN = {
    "fallback": (
        'library = torch.library.Library("_", "IMPL")\n'
        'library.fallback(torch.library.fallthrough_kernel, "PrivateUse3")',
        "a backend fallback on PrivateUse3",
    ),
    "kernel": (
        'library = torch.library.Library("aten", "IMPL", "PrivateUse3")\n'
        'library.impl("add.Tensor", lambda a, b, alpha=1: a)',
        "a kernel of aten::add.Tensor on PrivateUse3",
    ),
    "autograd-fallback": (
        'library = torch.library.Library("_", "IMPL")\n'
        'library.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse3")',
        "a backend fallback on AutogradPrivateUse3",
    ),
}
SCRIPT = """
import sys
import torch
import torch.distributed.tensor
{take}
owner = {owner!r}
types = (torch.Tensor, torch.nn.Parameter, torch.distributed.tensor.DTensor)
before = [dict(vars(kind)) for kind in types]
finders = list(sys.meta_path)
torch.ops.load_library({path!r})
ops = torch.ops.qshard
x = torch.randn(4, 32)
for make in (lambda: ops.quantize(x, "float8_blockwise"),
             lambda: ops.quantize(x.to("meta"), "mxfp8")):
    try:
        make()
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        assert message.startswith("qshard::quantize: the dispatch key PrivateUse3 is already in")
        assert owner in message, message
    else:
        raise AssertionError("quantized")
assert not ops.is_quantized(x)
assert [dict(vars(kind)) for kind in types] == before and sys.meta_path == finders
try:
    import qshard
except ImportError as error:
    assert owner in str(error) and "\\n" not in str(error)
else:
    raise AssertionError("imported")

model = torch.nn.Linear(32, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(x).sum().backward()
optimizer.step()
print("goes on")
"""


@pytest.mark.parametrize("who", TAKEN)
def test_a_process_whose_key_is_taken_goes_on(who, tmp_path):
    take, owner = TAKEN[who]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(take=take, owner=owner, path=qshard.library_path()))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if "qshard" in line]
    (line,) = said
    assert "PrivateUse3 is already in use by another library" in line and owner in line


# ------------------------------------------------------------------------- other people's models


class WithState(torch.nn.Linear):
    """A user's module, whose buffers have the names that qshard gives to its own."""

    def __init__(self):
        super().__init__(16, 16)
        for name in ("weight_rounding", "weight_amax_history", "weight_scaling_amax"):
            self.register_buffer(name, torch.zeros(3))


def save_without(folder, model, missing):
    state = {name: value for name, value in model.state_dict().items() if name not in missing}
    dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("name", ["0.weight_rounding", "0.weight_amax_history", "0.bias"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-quantized"])
def test_missing_keys_of_others_are_errors(name, beside, tmp_path):
    model = torch.nn.Sequential(WithState(), torch.nn.Linear(16, 16))
    save_without(tmp_path, model, [name])
    if beside:
        qshard.quantize_(model, qshard.DelayedScaling(), filter_fn=lambda _, name: name == "1")
    with pytest.raises(CheckpointException, match=f"Missing key in .*: model.{name}"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)


@pytest.mark.parametrize(
    "recipe, kwargs",
    [
        (qshard.DelayedScaling(), {}),
        (qshard.Float8BlockScaling(), dict(keep_master=False, stochastic_rounding=True)),
    ],
    ids=["delayed", "stochastic"],
)
def test_weights_of_plain_checkpoints_load_without_our_state(recipe, kwargs, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    save_without(tmp_path, model, [])
    value = model[0].weight.detach().clone()
    qshard.quantize_(model, recipe, **kwargs)
    with torch.no_grad():
        model[0].weight.zero_()
    state = model.state_dict()
    assert len(state) > 2
    dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.allclose(model[0].weight.detach() * 1, value, atol=0.05)
    # Other keys that this checkpoint lacks are missing as ever.
    state["0.other"] = torch.zeros(3)
    with pytest.raises(CheckpointException, match="model.0.other"):
        dcp.load({"model": state}, checkpoint_id=tmp_path, no_dist=True)


def test_plain_tensors_have_no_attribute_of_ours():
    plain = torch.zeros(2, 2)
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather", "__get_tensor_shard__"):
        assert not hasattr(plain, name) and not hasattr(torch.nn.Parameter(plain), name)
        assert hasattr(ops.quantize(plain, "float8_blockwise"), name)
    assert not hasattr(torch.Tensor, "__create_chunk_list__")


DEEPCOPY = """
import copy, tempfile, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
{first}
{second}
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
shards = sharded_tensor.rand(spec, 4, 2)
copied = copy.deepcopy({{"weight": shards}})["weight"]
assert torch.equal(copied.local_tensor(), shards.local_tensor())
assert copied.local_tensor().data_ptr() != shards.local_tensor().data_ptr()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_sharded_tensors_are_copied(is_first):
    """FSDP1's SHARDED state dicts have them, wherever the library was loaded."""
    lines = ["import torch.distributed._shard.sharded_tensor", "import qshard"]
    first, second = lines[::-1] if is_first else lines
    script = DEEPCOPY.format(first=first, second=second)
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
