"""One rank of 1,024 and of 8,192, over a process group that sends nothing: a model of all formats, on every mesh.

The bytes that the rank holds are those of bench/scale/local_bytes.py, from which the scale model has its memory.
"""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from dist_helpers import forget_meshes
from torch import optim
from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parents[3] / "bench" / "scale"))
import fake_ranks as many  # noqa: E402

BLOCKS = 3  # of two weights, for six formats


def format_of(name):
    block, _, rest = name.partition(".")
    return many.FORMATS[(2 * int(block) + rest.startswith("down")) % len(many.FORMATS)]


@pytest.mark.pairwise
@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("ranks", [1024, 8192])
@pytest.mark.parametrize("kind", many.MESHES)
def test_a_rank_trains_and_holds_the_bytes_of_the_formula(kind, ranks, place):
    many.start({"first": 0, "middle": ranks // 2, "last": ranks - 1}[place], ranks)
    try:
        mesh = many.make_mesh(kind, ranks)
        model = many.make_model(kind, mesh, format_of, BLOCKS)
        many.step(model, optim.AdamW(model.parameters()))
        held = many.local_bytes(model)
        assert {format_of(name) for name in held} == set(many.FORMATS)
        assert not many.different(kind, mesh, model, format_of)
        rows = {name: p.to_local().shape[0] for name, p in model.named_parameters()}
        if kind in ("fsdp", "tp") and place == "last":  # 704 rows, or 88 and 64 of them on a tensor-parallel rank
            assert not any(rows[name] for name in rows if "." in name.removesuffix(".weight"))
        if place == "first":
            assert all(rows.values())
    finally:
        dist.destroy_process_group()
        forget_meshes()


def test_gathers_of_hsdp_slice_no_mesh(monkeypatch):
    """A slice of a mesh of 8,192 ranks takes milliseconds."""
    many.start(0, 1024)
    try:
        model = many.make_model("hsdp", many.make_mesh("hsdp", 1024), format_of, BLOCKS)
        optimizer = optim.AdamW(model.parameters())
        many.step(model, optimizer)
        slices = []
        monkeypatch.setattr(DeviceMesh, "__getitem__", lambda mesh, names: slices.append(names))
        many.step(model, optimizer)
        assert not slices
    finally:
        dist.destroy_process_group()
        forget_meshes()
