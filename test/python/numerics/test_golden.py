"""No bit has moved since the golden digests were written (test/golden/digests.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dist_helpers import device, full_mesh, on_worlds
from torch.distributed.fsdp import fully_shard

import qshard

GOLDEN = Path(__file__).parents[2] / "golden"
sys.path.insert(0, str(GOLDEN))

import digests  # noqa: E402
import fixtures  # noqa: E402
import measure  # noqa: E402
from canonical import bytes_of, digest, pickle_stream  # noqa: E402

ops = torch.ops.qshard
STORED = json.loads(digests.STORED.read_text())
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("section", digests.SECTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_moved(device, section):
    known, found = digests.expected(STORED, section, device), digests.measured(section, device)
    if not found:
        return  # the section is measured on the other device alone
    key = digests.key_of(section)
    assert known is not None, f"{key} is not in digests.json; `digests.py write --section` adds it"
    moved = digests.differences(known, found)
    assert not moved, "\n".join(moved)


def test_another_process_finds_the_same():
    environment = dict(os.environ, QSHARD_LIBRARY=qshard.library_path(), MALLOC_PERTURB_="90")
    environment["PYTHONHASHSEED"] = "90"
    sections = [
        s for name in ("gradients on the wire", "saved tensors") for s in ("--section", name)
    ]
    command = [sys.executable, str(GOLDEN / "digests.py"), "compare", *sections]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "no bit moved\n"), result.stderr[-2000:]


def test_every_format_and_file_has_digests():
    assert all(
        any(case.startswith(f"{name}, ") for case in STORED["quantize"]) for name in ops.formats()
    )
    assert set(measure.SECTIONS) | set(fixtures.SECTIONS) == set(digests.SECTIONS)
    names = {path.name for path in fixtures.FILES.iterdir()}
    assert names == {
        "tensors.pt", "tensors.pkl", "modules.pt", "optimizers.pt", "state_dicts.pt", "checkpoint"
    }  # fmt: skip


def test_what_moved_is_named():
    known = {"mxfp8, ragged": "codes 1a, scales 2b", "gone": "codes 3c"}
    found = {"mxfp8, ragged": "codes 1a, scales 2c, image 4d", "new": "codes 5e"}
    assert digests.differences(known, found) == [
        "mxfp8, ragged: scales 2b, now 2c",
        "mxfp8, ragged: image was not there, now 4d",
        "gone: is gone",
        "new: is new",
    ]


def test_equal_strings_are_one_in_a_pickles_canonical_form():
    import pickle

    name = "".join(["a", "b"])
    other = "".join(["a", "b"])
    assert name is not other
    one, two = pickle.dumps([name, name], 2), pickle.dumps([name, other], 2)
    assert one != two and pickle_stream(one) == pickle_stream(two)
    assert pickle_stream(one) != pickle_stream(pickle.dumps([name, "ac"], 2))


# ---------------------------------------------------------------------- the bytes of several ranks

GATHERED = ("ragged", "one column", "wide", "stack of matrices", "NaN and infinity")


def image_of_ranks(format, case):
    """What this rank puts into the gather, before and after all ranks have written: the same."""
    shape, kind, dtype = measure.CASES[case]
    q = measure.quantized(format, device(), shape, keep_master=True, kind=kind, dtype=dtype)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(q)
    mesh = full_mesh()
    fully_shard(module, mesh=mesh)
    shard = module.weight.to_local()
    (image,), _ = shard.fsdp_pre_all_gather(mesh)
    before = bytes_of(image)
    ops._mark_written(shard)
    (image,), _ = shard.fsdp_pre_all_gather(mesh)
    assert bytes_of(image) == before
    return before


def images_of_ranks():
    return {
        f"{format}, {case}": image_of_ranks(format, case)
        for format in ops.formats()
        for case in GATHERED
    }


@on_worlds(1, 2, 3)
def test_ranks_gather_the_image_of_the_whole_tensor(world):
    """And behind it zeros, up to the rows that FSDP2 pads shards to."""
    known = digests.expected(STORED, "quantize", world.device)
    of_ranks = world.run(images_of_ranks)
    for name in of_ranks[0]:
        format, _, case = name.rpartition(", ")
        shape = measure.fit(format, measure.CASES[case][0])
        gathered = b"".join(images[name] for images in of_ranks)
        slices = -(-shape[0] // world.size) * world.size
        bytes_of_whole = len(gathered) // slices * shape[0]
        parts = digests.parts_of(known[name])
        wanted = parts.get("image beside a master", parts["image"])
        assert digest(gathered[:bytes_of_whole]) == wanted, name
        assert not any(gathered[bytes_of_whole:]), name
