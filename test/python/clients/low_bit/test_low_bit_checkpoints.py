"""save_quantized and load_quantized: every layout, from two FSDP2 ranks to other worlds, and files
that are wrong."""

import json
import re
import shutil
import sys
from unittest import mock

import pytest
import torch
from dist_helpers import World
from low_bit_models import (
    ROWS,
    Model,
    assert_equal_tensors,
    build,
    code_values,
    is_weight,
    load,
    load_wrong,
    memory_of_save,
    refused,
    save,
    save_failing,
    save_wrong,
)
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import qshard
from qshard.checkpoint import load_quantized, save_quantized

BUDGET_S = 60
TWO, THREE = World("cpu", 2), World("cpu", 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{row: (directory, values)}, written when asked for."""
    known = {}

    def of(row):
        if row not in known:
            directory = tmp_path_factory.mktemp("model")
            (values, said), (others, also) = TWO.run(save, row, directory, max_file_bytes=300_000)
            assert not said and not also
            assert all(torch.equal(values[name], others[name]) for name in values)
            known[row] = directory, values
        return known[row]

    return of


@pytest.mark.parametrize("row", ROWS)
def test_another_world_reads_what_two_ranks_wrote(saved, row):
    directory, values = saved(row)
    assert_equal_tensors(THREE.run(load, row, directory)[2], values)
    for keep_master in (False, True):
        assert_equal_tensors(load(row, directory, keep_master, sharded=False), values)


@pytest.mark.parametrize("row", ["deepseek-fp8", "compressed-tensors, nvfp4"])
def test_ranks_write_equal_shares(saved, row):
    directory, _ = saved(row)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {file: load_file(directory / file) for file in set(index["weight_map"].values())}
    assert {k: f for f, tensors in files.items() for k in tensors} == index["weight_map"]
    sizes = {f: sum(t.nbytes for t in tensors.values()) for f, tensors in files.items()}
    assert len(sizes) >= 2 and sum(sizes.values()) == index["metadata"]["total_size"]
    assert {p.name for p in directory.iterdir()} == {
        *sizes, "config.json", "model.safetensors.index.json"
    }
    assert all(t.is_contiguous() for tensors in files.values() for t in tensors.values())
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert config.get("ignore", config.get("modules_to_not_convert")) == ["lm_head"]


@pytest.mark.parametrize("row", ["deepseek-fp8", "compressed-tensors, nvfp4"])
def test_no_rank_holds_more_than_one_weight(tmp_path, row):
    """Above the model: a weight's pieces, and what they are put together to."""
    sizes = TWO.run(memory_of_save, row, tmp_path)
    largest = 256 * 256 // (2 if "nvfp4" in row else 1)
    assert max(written for _, written in sizes) == largest
    assert all(0 < peak < 2.5 * largest for peak, _ in sizes), sizes


def as_fp32(tensors):
    for name in tensors:
        if name.endswith("weight_scale_inv"):
            tensors[name] = tensors[name].float()


def as_bytes(tensors):
    for name in tensors:
        if name.endswith("weight_scale_inv"):
            tensors[name] = tensors[name].view(torch.uint8)


@pytest.mark.parametrize("rewrite", [as_fp32, as_bytes])
def test_exponents_may_be_fp32_or_bytes(saved, tmp_path, rewrite):
    """As DeepSeek-V3.1 has them, and what transformers reads too."""
    row = "deepseek-fp8, ue8m0"
    directory, values = saved(row)
    shutil.copytree(directory, tmp_path / "copy")
    edit_tensors(rewrite)(tmp_path / "copy")
    assert_equal_tensors(load(row, tmp_path / "copy", sharded=False), values)


NAMES = {"function": lambda name: f"model.{name}", "mapping": {"steps": "counter"}}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_names_of_checkpoints_may_be_chosen(tmp_path, names):
    row = "modelopt, nvfp4"
    model = build(row, sharded=False)
    save_quantized(model, tmp_path, layout="modelopt", names=names)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("counter" in weight_map) == isinstance(names, dict)
    assert ("model.layers.0.q_proj.weight_scale_2" in weight_map) == callable(names)
    assert_equal_tensors(load(row, tmp_path, sharded=False, names=names), code_values(model))


def ignored(model, directory, **kwargs):
    save_quantized(model, directory, layout="compressed-tensors", **kwargs)
    return json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]


def test_plain_linears_with_a_weight_of_another_name_are_ignored_by_readers(tmp_path):
    """Tied to an embedding, tied to each other, within a wrapper."""
    model = torch.nn.ModuleDict({
        "embed_tokens": torch.nn.Embedding(64, 32),
        "up_proj": torch.nn.Linear(32, 64),
        "first": torch.nn.Linear(32, 64),
        "second": torch.nn.Linear(32, 64),
        "lm_head": torch.nn.Linear(32, 64, bias=False),
    })
    model["lm_head"].weight = model["embed_tokens"].weight
    model["second"].weight = model["first"].weight
    model["lm_head"] = checkpoint_wrapper(model["lm_head"])
    qshard.quantize_(model, qshard.Float8BlockScaling(), filter_fn=is_weight)
    assert ignored(model, tmp_path / "a") == ["first", "lm_head", "second"]
    names = {"lm_head.weight": "output.weight"}
    assert ignored(model, tmp_path / "b", names=names) == ["first", "output", "second"]
    with pytest.raises(ValueError, match="names gives 3 for lm_head.weight, not a string"):
        ignored(model, tmp_path / "c", names={"lm_head.weight": 3})
    assert not list((tmp_path / "c").glob("*.safetensors"))


def test_linears_of_several_parameters(tmp_path):
    def build():
        torch.manual_seed(0)
        split = qshard.nn.Linear(32, 64, parameters_split=("q_", "k_"), bias=False)
        plain = qshard.nn.Linear(32, 64, parameters_split=("a_", "b_"), bias=False)
        model = torch.nn.ModuleDict({"qk": split, "ab": plain})
        return qshard.quantize_(model, qshard.Float8BlockScaling(), filter_fn=lambda m, name: name == "qk")

    def names(key):
        return re.sub(r"\.(\w)_weight", r".\1_proj.weight", key)

    model = build()
    assert ignored(model, tmp_path, names=names) == ["ab.a_proj", "ab.b_proj"]
    with torch.no_grad():
        other = build()
        for parameter in other.parameters():
            parameter.zero_()
    load_quantized(other, tmp_path, names=names)
    assert_equal_tensors(code_values(other), code_values(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_plain_tensors_of_any_dtype_come_back(tmp_path, dtype):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64))
        model.register_buffer("table", torch.randn(8, 16).to(dtype))
        return qshard.quantize_(model, qshard.Float8BlockScaling())

    model, other = build(0), build(1)
    save_quantized(model, tmp_path, layout="deepseek-fp8")
    load_quantized(other, tmp_path)
    assert other.table.dtype == dtype and torch.equal(other.table.double(), model.table.double())


def test_foreign_directory_without_index_or_exact_scales(saved, tmp_path):
    """The reciprocal of the reciprocal: one ulp in the tensor scale at most."""
    directory, values = saved("compressed-tensors, nvfp4")
    shutil.copytree(directory, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors.index.json").unlink()
    for name, value in load("compressed-tensors, nvfp4", tmp_path / "copy", sharded=False).items():
        torch.testing.assert_close(value, values[name], rtol=2e-7, atol=0)


@pytest.mark.parametrize("row", ["compressed-tensors, nvfp4", "modelopt, nvfp4"])
def test_fused_weights_are_quantized_together(tmp_path, row):
    """As one matrix on one device would be; a load gives these values."""
    (values, said), (_, also) = TWO.run(save, row, tmp_path, share=False)
    assert len(said) == 1 and "layers.0.q_proj.weight, layers.0.k_proj.weight" in said[0] and not also
    assert "qshard.quantize_(model, recipe, share_tensor_scale=True), before training" in said[0]
    loaded = THREE.run(load, row, tmp_path)[0]
    plain = build(row, sharded=False, share=False)
    for i, layer in enumerate(plain.layers):
        weights = [layer.q_proj.weight, layer.k_proj.weight]
        together = torch.cat([qshard.ops.master(w) for w in weights]).detach()
        expected = qshard.ops.quantize(together, qshard.ops.format(weights[0]))
        got = torch.cat([loaded[f"layers.{i}.{name}_proj.weight"] for name in "qk"])
        assert torch.equal(got, qshard.ops.dequantize(expected))
        assert torch.equal(loaded[f"layers.{i}.o_proj.weight"], values[f"layers.{i}.o_proj.weight"])


@pytest.mark.parametrize("row", ["compressed-tensors, nvfp4", "modelopt, nvfp4"])
def test_weights_that_share_a_scale_are_written_as_they_are(tmp_path, row):
    (values, said), (_, also) = TWO.run(
        save, row, tmp_path, share=False, quantize={"share_tensor_scale": True}
    )
    assert not said and not also
    assert_equal_tensors(THREE.run(load, row, tmp_path)[0], values)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_config_names_the_class_of_the_model(tmp_path, is_compiled):
    model = build("deepseek-fp8", sharded=False)
    save_quantized(torch.compile(model) if is_compiled else model, tmp_path, layout="deepseek-fp8")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Model"]


def test_config_names_the_class_of_a_sharded_model(saved):
    directory, _ = saved("deepseek-fp8")
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["Model"]


@pytest.mark.parametrize("known", [None, ["LlamaForCausalLM"]])
def test_architectures_of_a_config(tmp_path, known):
    """What is there is kept; transformers writes null for a model that was not loaded."""
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=known, vocab_size=7)))
    save_quantized(build("deepseek-fp8", sharded=False), tmp_path, layout="deepseek-fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == (known or ["Model"]) and config["vocab_size"] == 7


# ------------------------------------------------------------------------------ what is refused


def edit_json(name, change):
    def edit(directory):
        content = json.loads((directory / name).read_text())
        change(content)
        (directory / name).write_text(json.dumps(content))

    return edit


def edit_tensors(change):
    def edit(directory):
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file)

    return edit


def truncate(directory):
    for file in directory.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])


def scale_with_mantissa(tensors):
    for name in tensors:
        if name.endswith("weight_scale_inv"):
            tensors[name] = tensors[name] * 1.5


def transposed(tensors):
    for name in tensors:
        if name.endswith("k_proj.weight"):
            tensors[name] = tensors[name].t().contiguous()


def without_scales(tensors):
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        del tensors[name]


def with_another(tensors):
    tensors[f"another.{len(tensors)}"] = torch.ones(1)


def header_of_another_size(directory):
    file = sorted(directory.glob("*.safetensors"))[0]
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


INDEX = "model.safetensors.index.json"
WRONG = {
    "nothing there": (shutil.rmtree, "FileNotFoundError.*no config.json"),
    "truncated": (truncate, "ValueError.*safetensors cannot be read"),
    "a header's size": (header_of_another_size, "ValueError.*safetensors cannot be read"),
    "a file is gone": (
        lambda d: sorted(d.glob("*.safetensors"))[0].unlink(), "FileNotFoundError.*model-00001"
    ),
    "not JSON": (lambda d: (d / "config.json").write_text("{"), "ValueError.*config.json is not JSON"),
    "not quantized": (
        edit_json("config.json", lambda c: c.pop("quantization_config")), "no quantization_config"
    ),
    "another method": (
        edit_json("config.json", lambda c: c["quantization_config"].update(quant_method="awq")), "'awq'"
    ),
    "another layout": (
        edit_json("config.json", lambda c: c["quantization_config"].update(quant_method="modelopt")),
        "layout 'modelopt' has no weights of block scaling",
    ),
    "an index of other files": (
        edit_json(INDEX, lambda c: c["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        "weight_map",
    ),
    "an index of other tensors": (
        edit_json(INDEX, lambda c: c["weight_map"].update(more=c["weight_map"]["lm_head.weight"])),
        "says that more is in",
    ),
    "a mantissa": (edit_tensors(scale_with_mantissa), "proj.weight: .*not powers of two"),
    "a shape": (edit_tensors(transposed), r"k_proj.weight is F8_E4M3 \[256, 96\].*\[96, 256\]"),
    "no scales": (edit_tensors(without_scales), "says that .*weight_scale_inv is in"),
    "a tensor more": (edit_tensors(with_another), "another.*no place for"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_directories_are_refused(saved, tmp_path, case):
    edit, message = WRONG[case]
    directory = tmp_path / "copy"
    shutil.copytree(saved("deepseek-fp8")[0], directory)
    edit(directory)
    for error in TWO.run(load_wrong, "deepseek-fp8", directory):
        assert "qshard.checkpoint.load_quantized: " in error, error
        assert re.search(message, error), error


def test_a_model_of_another_recipe(saved):
    errors = TWO.run(load_wrong, "deepseek-fp8", saved("deepseek-fp8")[0], "modelopt, nvfp4")
    assert all("has no weights of nvfp4 scaling" in error for error in errors)
    with pytest.raises(ValueError, match="is plain, and .* is quantized in the files; quantize"):
        load_quantized(Model(), saved("deepseek-fp8")[0])


SAVES = {
    "layout": (("gguf", {}, "deepseek-fp8"), "ValueError.*layout must be one of"),
    "scale_fmt": (("deepseek-fp8", {"scale_fmt": "e8m0"}, "deepseek-fp8"), "one of float, ue8m0, not"),
    "scale_fmt of a layout": (
        ("compressed-tensors", {"scale_fmt": "ue8m0"}, "deepseek-fp8"), "'deepseek-fp8' has"
    ),
    "scales": (
        ("deepseek-fp8", {"scale_fmt": "ue8m0"}, "deepseek-fp8, fp32 scales"),
        r"ValueError.*layers.0.\w_proj.weight has scales that are not powers of two",
    ),
    "format": (("deepseek-fp8", {}, "modelopt, mxfp8"), "ValueError.*compressed-tensors, modelopt"),
    "names": (("modelopt", {"names": len}, "modelopt, mxfp8"), "ValueError.*not a string"),
    "one name": (("modelopt", {"names": {"steps": "norm.bias"}}, "modelopt, mxfp8"), "and for"),
    "a name": (
        ("modelopt", {"names": {"layers.0.k_proj.weight": "k"}}, "modelopt, mxfp8"), "<module>.weight"
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_what_save_refuses(tmp_path, case):
    (layout, kwargs, row), message = SAVES[case]
    for error in TWO.run(save_wrong, tmp_path / "new", layout, kwargs, row):
        assert "qshard.checkpoint.save_quantized: " in error
        assert re.search(message, error), error
    assert not list(tmp_path.rglob("*.safetensors"))


def test_directories_with_files_are_left_alone(saved):
    directory, _ = saved("deepseek-fp8")
    before = {p: p.read_bytes() for p in directory.iterdir()}
    for error in TWO.run(save_wrong, directory, "deepseek-fp8", {}, "deepseek-fp8"):
        assert error.startswith("FileExistsError") and "empty directory" in error
    assert before == {p: p.read_bytes() for p in directory.iterdir()}


def test_a_full_disk_leaves_no_files(tmp_path):
    from qshard.checkpoint import files

    model = build("deepseek-fp8", sharded=False)
    with mock.patch.object(files.FileWriter, "write", side_effect=OSError(28, "No space left")):
        with pytest.raises(OSError, match="save_quantized.*No space left"):
            save_quantized(model, tmp_path, layout="deepseek-fp8")
    assert not list(tmp_path.iterdir())


FAILURES = {
    "opening": ("files.FileWriter.__init__", OSError(13, "Permission denied")),
    "gathering": ("ranks._bytes", torch.OutOfMemoryError("no memory")),
    "putting together": ("planes.Plane.whole", RuntimeError("no memory")),
    "writing": ("files.FileWriter.write", OSError(28, "No space left")),
    "naming": ("files.FileWriter.finish", OSError(18, "another device")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_one_rank_meets_while_writing_is_raised_on_all(tmp_path, failure):
    place, error = FAILURES[failure]
    for said in TWO.run(save_failing, "deepseek-fp8", tmp_path, place, error):
        assert said.startswith(type(error).__name__), said
        assert re.search(rf"save_quantized: .*{error.args[-1]}.*\(rank 1\)", said), said
    assert not list(tmp_path.iterdir())


def test_ragged_columns_are_refused_by_name(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(40, 32))
    qshard.quantize_(model, qshard.MXFP8BlockScaling())
    with pytest.raises(ValueError, match="0.weight has 40 columns.*multiple of 32"):
        save_quantized(model, tmp_path, layout="compressed-tensors")


def test_a_model_without_values_is_refused_on_all_ranks(saved):
    directory = saved("deepseek-fp8")[0]
    for errors in TWO.run(refused, directory):
        assert all("is on the meta device" in error for error in errors), errors
    assert not (directory / "new").exists()


def test_without_the_package(saved):
    model = build("deepseek-fp8", sharded=False)
    with mock.patch.dict(sys.modules, safetensors=None):
        with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
            load_quantized(model, saved("deepseek-fp8")[0])
