"""Workers that are spawned, torch.export.save, and values given to weights the ways libraries do."""

import io

import pytest
import torch
from torch import nn

import qshard

keep_or_not = pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])


def build(**kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return qshard.quantize_(model, qshard.Float8BlockScaling(), **kwargs).eval()


class Encoded(torch.utils.data.Dataset):
    """Rows that a model computes, in the workers."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, i):
        with torch.no_grad():
            return self.model(torch.full((1, 32), float(i)))[0]


@keep_or_not
def test_workers_of_a_data_loader_are_spawned_with_a_model(keep_master):
    rows = Encoded(build(keep_master=keep_master))
    loader = torch.utils.data.DataLoader(
        rows, batch_size=3, num_workers=1, multiprocessing_context="spawn"
    )
    for number, batch in enumerate(loader):
        assert torch.equal(batch, torch.stack([rows[3 * number + i] for i in range(3)]))


def test_an_exported_program_is_saved_with_plain_values():
    model, x = build(), torch.randn(2, 32)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    # Which are quantized again at each use.
    assert torch.equal(loaded(x), model(x))
    assert not any(qshard.is_quantized(p) for p in loaded.parameters())


def test_an_exported_program_without_masters_names_the_way_out():
    model, x = build(keep_master=False), torch.randn(2, 32)
    program = torch.export.export(model, (x,))
    with pytest.raises(RuntimeError, match="without a master.*qshard::dequantize"):
        torch.export.save(program, io.BytesIO())
    plain = qshard.dequantize_(build(keep_master=False))
    torch.export.save(torch.export.export(plain, (x,)), io.BytesIO())


@keep_or_not
def test_values_are_copied_not_assigned_to_data(keep_master):
    model = build(keep_master=keep_master)
    weight, values = model[0].weight, torch.randn(48, 32)
    before = weight.detach() * 1
    with pytest.raises(RuntimeError, match=r"x.data.copy_\(y\) writes the values, and qshard.deq"):
        weight.data = values
    assert torch.equal(weight.detach() * 1, before) and qshard.is_quantized(weight)
    weight.data.copy_(values)
    qshard.flush(model)
    twin = qshard.ops.quantize(values, "float8_blockwise", keep_master=keep_master)
    assert torch.equal(weight.detach() * 1, twin * 1)
