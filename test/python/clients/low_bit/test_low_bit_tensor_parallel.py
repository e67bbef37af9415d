"""save_quantized and load_quantized of tensor-parallel models, alone and under FSDP2."""

import json
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_helpers import World, full_mesh
from low_bit_models import assert_equal_tensors, code_values
from models import tensor_parallel
from models.formats import RECIPES
from safetensors.torch import load_file

import qshard
from qshard.checkpoint import load_quantized, save_quantized

BUDGET_S = 90
ops = torch.ops.qshard
MESHES = {"tp 2": (1, 2), "dp 2 x tp 2": (2, 2)}
LAYOUTS = {
    "float8_blockwise": "deepseek-fp8",
    "float8_tensorwise": "compressed-tensors",
    "float8_rowwise": "compressed-tensors",
    "mxfp8": "compressed-tensors",
    "mxfp8_1x32": "modelopt",
    "nvfp4": "compressed-tensors",
    "nvfp4_1x16": "modelopt",
}
# (format, dim, hidden, weights whose cuts over two ranks are inside blocks)
ALIGNED = [
    ("float8_blockwise", 128, 512, []),
    ("float8_blockwise", 200, 256, []),
    ("float8_tensorwise", 100, 257, []),
    ("float8_tensorwise", 200, 328, []),
    ("float8_rowwise", 100, 257, []),
    ("float8_rowwise", 200, 328, []),
    ("mxfp8", 96, 192, []),
    ("mxfp8_1x32", 96, 192, []),
    ("nvfp4", 80, 160, []),
    ("nvfp4_1x16", 80, 160, []),
]
BOTH = ["up.weight", "down.weight"]
CUT = [
    ("float8_blockwise", 100, 257, BOTH),
    ("float8_blockwise", 200, 328, BOTH),
    ("mxfp8", 96, 160, BOTH),
    ("nvfp4", 80, 176, BOTH),
    ("nvfp4_1x16", 80, 176, ["down.weight"]),
]
CASES = [pytest.param(*case, id=f"{case[0]}-{case[2]}x{case[1]}") for case in ALIGNED + CUT]


def model_of(format, dim, hidden, shape, keep_master=True):
    """On no mesh if shape is None."""
    if shape is not None:
        mesh = full_mesh(*shape, names=("dp", "tp"))
        fsdp = shape[0] > 1
        model = tensor_parallel.build(format, mesh, dim, hidden, fsdp=fsdp, keep_master=keep_master)
    else:
        model = tensor_parallel.initialise(tensor_parallel.mlp(dim, hidden, "cpu"))
        qshard.quantize_(model, RECIPES[format], keep_master=keep_master)
    qshard.flush(model)
    return model


def said(function, *args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(w.message) for w in caught if "qshard.checkpoint" in str(w.message)]


def save(format, dim, hidden, shape, directory, **kwargs):
    """What was said, the codes' values, and the most that a gather has brought together here."""
    from qshard.checkpoint.planes import Plane

    model, most, whole = model_of(format, dim, hidden, shape, **kwargs), [0], Plane.whole

    def noted(*args):
        result = whole(*args)
        most.append(result.numel())
        return result

    with mock.patch.object(Plane, "whole", noted):
        texts = said(save_quantized, model, directory, layout=LAYOUTS[format])
    return texts, code_values(model), max(most)


def load(format, dim, hidden, shape, directory, **kwargs):
    model = model_of(format, dim, hidden, shape, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    qshard.flush(model)
    texts = said(load_quantized, model, directory)
    values = code_values(model)
    qshard.flush(model)
    again = code_values(model)
    assert all(torch.equal(values[name], again[name]) for name in values)
    return texts, values


def files_of(directory):
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


def assert_same_bytes(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        other = got[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor)]
        assert torch.equal(*bytes), name


@pytest.mark.each_value
@pytest.mark.parametrize("format, dim, hidden, cut", CASES)
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_files_are_those_of_one_process(tmp_path, shape, format, dim, hidden, cut):
    """Cut anywhere: of masters, the whole matrix is quantized as one process would."""
    model = model_of(format, dim, hidden, None)
    save_quantized(model, tmp_path / "one", layout=LAYOUTS[format])
    world = World("cpu", shape[0] * shape[1])
    results = world.run(save, format, dim, hidden, shape, tmp_path / "many")
    assert_same_bytes(files_of(tmp_path / "many"), files_of(tmp_path / "one"))
    texts = results[0][0]
    assert len(texts) == bool(cut) and not any(other[0] for other in results[1:])
    if cut:
        assert f"save_quantized: {', '.join(cut)}: tensor parallelism" in texts[0]
    else:
        assert_equal_tensors(results[0][1], code_values(model))
    assert max(most for _, _, most in results) <= dim * hidden
    many, one = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("many", "one"))
    assert many == one


@pytest.mark.parametrize("format, dim, hidden, cut", CASES)
def test_other_meshes_read_what_one_process_wrote(tmp_path, format, dim, hidden, cut):
    written = model_of(format, dim, hidden, None)
    save_quantized(written, tmp_path, layout=LAYOUTS[format])
    want = code_values(written)
    for shape in MESHES.values():
        for keep_master in (True, False):
            results = World("cpu", shape[0] * shape[1]).run(
                load, format, dim, hidden, shape, tmp_path, keep_master=keep_master
            )
            assert len(results[0][0]) == bool(cut) and not any(other[0] for other in results[1:])
            for texts, values in results:
                for name in want.keys() - set(cut):
                    assert torch.equal(values[name], want[name]), name
            # What is cut holds the quantized values of the files, in blocks of each part.
            expected = World("cpu", shape[0] * shape[1]).run(
                quantized_values, format, dim, hidden, shape, want
            )[0] if cut else {}
            for name in cut:
                assert torch.equal(results[0][1][name], expected[name]), name


def quantized_values(format, dim, hidden, shape, values):
    """What a model shows that these full values were written into."""
    model = model_of(format, dim, hidden, shape)
    with torch.no_grad():
        for name in ("up", "down"):
            tensor_parallel.write(getattr(model, name).weight, values[f"{name}.weight"])
    qshard.flush(model)
    return code_values(model)


@pytest.mark.parametrize("format", ["float8_blockwise", "nvfp4"])
def test_from_one_mesh_to_another(tmp_path, format):
    dim, hidden = 128, 512
    (_, want, _), *_ = World("cpu", 4).run(save, format, dim, hidden, (2, 2), tmp_path)
    for size, shape in ((2, (1, 2)), (4, (1, 4)), (4, (4, 1))):
        for texts, values in World("cpu", size).run(load, format, dim, hidden, shape, tmp_path):
            assert not texts
            assert_equal_tensors(values, want)


def wrong(directory, shape):
    """Errors of saving and of loading, after which the model is what it was."""
    model, errors = model_of("float8_blockwise", 128, 256, shape), []
    before = code_values(model)
    for call in (
        lambda: save_quantized(model, directory, layout="modelopt"),
        lambda: load_quantized(model, directory),
    ):
        try:
            call()
            errors.append("none")
        except Exception as met:
            errors.append(f"{type(met).__name__}: {met}")
    assert_equal_tensors(code_values(model), before)
    dist.barrier()
    return errors


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_errors_are_those_of_all_ranks(tmp_path, shape):
    model = model_of("float8_blockwise", 128, 384, None)  # of another shape
    save_quantized(model, tmp_path, layout="deepseek-fp8")
    before = files_of(tmp_path)
    for errors in World("cpu", shape[0] * shape[1]).run(wrong, tmp_path, shape):
        assert "save_quantized: layout 'modelopt' has no weights of block scaling" in errors[0]
        assert "load_quantized: up.weight is F8_E4M3 [384, 128] in the files" in errors[1]
    assert_same_bytes(files_of(tmp_path), before)


def save_without_masters(format, dim, hidden, shape, directory):
    """The values of the files, by one process, are those of quantizing the model's own once more."""
    texts, values, _ = save(format, dim, hidden, shape, directory, keep_master=False)
    base = RECIPES[format].format
    again = {name: ops.quantize(values[name], base) for name in BOTH}
    return texts, {name: ops.dequantize(value) for name, value in again.items()}


@pytest.mark.parametrize("format, dim, hidden", [("float8_blockwise", 100, 257), ("nvfp4", 80, 176)])
def test_cut_weights_without_masters_are_quantized_once_more(tmp_path, format, dim, hidden):
    (texts, want), *_ = World("cpu", 4).run(
        save_without_masters, format, dim, hidden, (2, 2), tmp_path
    )
    assert len(texts) == 1
    model = model_of(format, dim, hidden, None)
    load_quantized(model, tmp_path)
    got = code_values(model)
    assert all(torch.equal(got[name], want[name]) for name in BOTH)


def one_rank_has_more(directory):
    model = model_of("float8_blockwise", 128, 256, (1, 2))
    if dist.get_rank() == 1:
        model.more = torch.nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="more.weight is not in the model of every rank"):
        save_quantized(model, directory / "new", layout="deepseek-fp8")


def test_ranks_with_other_models_are_refused(tmp_path):
    World("cpu", 2).run(one_rank_has_more, tmp_path)
    assert not (tmp_path / "new").exists()


class Fused(torch.nn.Module):
    """gate_proj and up_proj, of which a cut over two ranks goes through blocks of one."""

    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(96, 176, bias=False)
        self.up_proj = torch.nn.Linear(96, 176, bias=False)


def fused(shape=None):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model, options = Fused(), {}
    with torch.no_grad():
        model.up_proj.weight.mul_(3)
    if shape is not None:
        tp_mesh = full_mesh(*shape, names=("dp", "tp"))["tp"]
        parallelize_module(model, tp_mesh, {n: ColwiseParallel() for n in ("gate_proj", "up_proj")})
        options = {"tp_mesh": tp_mesh}
    qshard.quantize_(model, RECIPES["nvfp4"], share_tensor_scale=True, **options)
    qshard.flush(model)
    return model


def save_fused(directory):
    return said(save_quantized, fused((1, 2)), directory, layout="modelopt")


def test_cut_weights_that_share_a_scale_still_do(tmp_path):
    model = fused()
    save_quantized(model, tmp_path / "one", layout="modelopt")
    texts, _ = World("cpu", 2).run(save_fused, tmp_path / "many")
    assert len(texts) == 1 and "gate_proj.weight, up_proj.weight: tensor parallelism" in texts[0]
    files = files_of(tmp_path / "many")
    assert torch.equal(files["gate_proj.weight_scale_2"], files["up_proj.weight_scale_2"])
    assert_same_bytes(files, files_of(tmp_path / "one"))
