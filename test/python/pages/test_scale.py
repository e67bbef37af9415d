"""The scale model: its constants are recorded, it is as far from recorded steps as it says, and the page shows its output."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_helpers import forget_meshes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qshard

CHECKOUT = Path(__file__).parents[3]
sys.path += [str(CHECKOUT / "bench"), str(CHECKOUT / "bench" / "scale")]
import model_shapes as shapes  # noqa: E402
import one_rank_group  # noqa: E402
import recorded_steps  # noqa: E402
import scale_tables as tables  # noqa: E402
import step_model as model  # noqa: E402
from local_bytes import Weight  # noqa: E402

FIGURE = json.loads((CHECKOUT / "docs" / "figures" / "scale.json").read_text())
NUMBERS = [*model.RECORD["constants"], *model.RECORD["runs"]]


def name_of(number):
    return number.get("name") or f"{number['gpus']}-{number['over']}-{number['ms']}"


@pytest.mark.parametrize("number", NUMBERS, ids=name_of)
def test_constants_are_recorded(number):
    lines = (CHECKOUT / number["source"]).read_text().splitlines()
    named = [line for line in lines if line.startswith(number["line"])]
    value = number.get("value", number.get("ms"))
    written = {f"{value:,}", f"{value}", f"{value:.1f}", f"{value:,.1f}", f"{value:.2f}"}
    found = {text for line in named for text in re.findall(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?", line)}
    found |= {text.rstrip(",") for text in found}
    assert written & found, f"{value} is not on the lines of {number['source']} that begin with {number['line']}"
    assert Path(number["source"]).name.startswith(number["date"])
    gpu = number["gpus"].split()[1]
    assert gpu in (CHECKOUT / number["source"]).read_text()


def test_the_figure_data_is_the_models_output():
    assert tables.output() == FIGURE, "run python bench/scale --write"


def test_rows_that_miss_say_why():
    rows = recorded_steps.rows()
    misses = [row for row in rows if not row["meets"]]
    assert all(row["reason"] for row in misses)
    assert len(misses) < len(rows) / 4
    # Within a node, where the host keeps up, none does.
    assert all(row["meets"] for row in rows if row["over"] == "NVLink" and row["mesh"][2] == 1)


@pytest.mark.parametrize("format, recorded", [("bf16", 4014), ("float8_tensorwise", 2269), ("nvfp4", 1506)])
def test_bytes_on_the_wire_are_those_that_were_counted(format, recorded):
    """2026-11-22-gradients.md has the MB of weights that a rank of two sends in a step: each layer and the root, twice."""
    job = tables.job(shapes.SLICE, format, 1, {"shards": 2})
    gathered = shapes.SLICE.layers * job.gathered_of_layer + 2 * shapes.SLICE.root
    assert 2 * gathered / 2 / 1e6 == pytest.approx(recorded, rel=0.003)


def test_a_slower_link_takes_longer_and_codes_less():
    mesh = {"shards": 64}
    for shape in shapes.SHAPES[:2]:
        times = [tables.job(shape, tables.BLOCKS, link, mesh).step().seconds for link in (25, 50, 100, 400)]
        assert times == sorted(times, reverse=True)
        plain = tables.job(shape, tables.BLOCKS, 25, mesh, gathers_codes=False).step().seconds
        assert times[0] < plain


class CountingGroup(one_rank_group.OneRankGroup):
    words = 0

    def allreduce(self, tensors, opts=None):
        CountingGroup.words += sum(tensor.numel() for tensor in tensors)
        return super().allreduce(tensors, opts)


@pytest.mark.parametrize("ranks", [2, 48])
@pytest.mark.parametrize("format", tables.FORMATS)
def test_a_flush_reduces_as_many_words_as_the_model_says(format, ranks, monkeypatch):
    monkeypatch.setattr(one_rank_group, "OneRankGroup", CountingGroup)
    one_rank_group.init_process_group(ranks)
    try:
        weight = Weight(300, 256)
        module = qshard.quantize_(nn.Linear(256, 300, bias=False), format)
        fully_shard(module, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = torch.optim.AdamW(module.parameters())
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
        module.weight.grad = torch.ones_like(module.weight)
        CountingGroup.words = 0
        optimizer.step()
        shape = shapes.Shape("", 1, 256, 0, 0, 0, (weight,))
        job = model.Job(shape, format, ranks, 1e9, tables.GPU)
        assert CountingGroup.words * 4 == job.flush_bytes
    finally:
        dist.destroy_process_group()
        forget_meshes()
