"""fuse_ on models of transformers: every class that it knows of the installed version computes,
saves, copies and pickles the same; and what looks like these classes is left."""

import copy
import functools
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers import saved_and_loaded
from accelerate.utils.dataclasses import get_module_class_from_name
from nn_helpers import assert_bits, randomize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import qshard
from qshard.fuse import attention
from qshard.fuse.families import files_of
from qshard.modules.packages import TRANSFORMERS

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)
# Norms of a layer, and whether its MLP is known.
KINDS = {
    "llama": (2, True), "mistral": (2, True), "qwen2": (2, True), "qwen3": (4, True),
    "gemma": (2, True), "gemma2": (4, True), "gemma3_text": (6, True), "phi": (1, False),
    "phi3": (2, True),
}
KNOWN = {name for parts in files_of(TRANSFORMERS).values() for name in parts}


def make(kind, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **options))
    for module in model.modules():
        if "Norm" in type(module).__name__:
            randomize(module)
    return model


def tokens_of(*shape):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(1))


def duplicates(plain):
    """What copies models. With the package `kernels` the rotary function is an object that pickle
    does not take, of plain models as of fused ones."""
    try:
        saved_and_loaded(plain)
    except AttributeError as error:
        assert find_spec("kernels") and "_create_func_module" in str(error)
        return (copy.deepcopy,)
    return copy.deepcopy, saved_and_loaded


class Turned:
    """Counts rotary embeddings of fused attentions."""

    def __init__(self, monkeypatch):
        self.count, rotate = 0, attention.rotate

        def counted(*args):
            self.count += 1
            return rotate(*args)

        monkeypatch.setattr(attention, "rotate", counted)


def step(model, tokens, call=None, **kwargs):
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=tokens, labels=tokens, **kwargs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def assert_near(got, expected, bound):
    torch.testing.assert_close(got[0], expected[0], rtol=bound, atol=0)
    for name, grad in got[1].items():
        error = (grad - expected[1][name]).norm() / expected[1][name].norm()
        assert grad.dtype == expected[1][name].dtype and error < bound, (name, error)


@functools.cache
def classes_of(kind):
    return frozenset(row.module for row in qshard.fuse_(make(kind)))


def test_all_known_classes_are_tried():
    assert set().union(*map(classes_of, KINDS)) - {"LayerNorm"} == KNOWN


# Without quantization the same but for rounding. A code of an activation may be another one, where
# a norm was rounded once instead of twice. Those are tried of one kind of each norm, MLP and
# attention.
PLAIN, SHORT = (torch.float32, False, 1e-4), (torch.bfloat16, False, 0.06)
CODES = (torch.float32, True, 0.05)


@pytest.mark.parametrize("kind, dtype, quantized, bound", [
    *((kind, *PLAIN) for kind in KINDS),
    *((kind, *case) for kind in ("qwen3", "gemma2", "phi", "phi3") for case in (SHORT, CODES)),
])
def test_fused_models_are_the_models(
    kind, dtype, quantized, bound, tmp_path, monkeypatch, recwarn
):
    turned = Turned(monkeypatch)
    plain, model = make(kind).to(dtype), make(kind).to(dtype)
    for one in (plain, model) if quantized else ():
        qshard.quantize_(one, qshard.Float8BlockScaling())
    names, parameters = list(model.state_dict()), list(model.parameters())
    recwarn.clear()  # of quantize_
    report = qshard.fuse_(model)
    norms, has_mlp = KINDS[kind]
    assert len(report) == 2 * (norms + has_mlp + 1) + 1 and not report.left and not len(recwarn)
    assert [row.name for row in report if row.pattern.startswith("rotary")] == [
        f"model.layers.{i}.self_attn" for i in range(2)]
    assert [row.name for row in report if "glu of" in row.pattern] == [
        f"model.layers.{i}.mlp" for i in range(2) if has_mlp]
    tokens = tokens_of(2, 9)
    got, expected = step(model, tokens), step(plain, tokens)
    assert turned.count == 4 and got[0].dtype == expected[0].dtype
    assert_near(got, expected, bound)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    if dtype != torch.float32 or quantized:
        return
    assert str(model) == str(plain)
    for duplicate in duplicates(plain):
        other = duplicate(model)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert_bits(step(other, tokens), got)
    assert not qshard.fuse_(model)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(plain) and not info["missing_keys"]
    generated = [m.eval().generate(tokens[:1], max_new_tokens=4) for m in (model, plain)]
    assert torch.equal(*generated) and generated[0].shape == (1, 13)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_each_sequence(kind, monkeypatch):
    """Each sequence has angles of its own."""
    turned, plain, model = Turned(monkeypatch), make(kind), make(kind)
    qshard.fuse_(model)
    tokens, positions = tokens_of(2, 9), torch.arange(9) + torch.tensor([[0], [3]])
    got, expected = (step(one, tokens, position_ids=positions) for one in (model, plain))
    assert turned.count == 4
    assert_near(got, expected, 1e-4)


@pytest.mark.takes_a_minute
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_checkpointed_and_compiled(kind):
    model, plain, tokens = make(kind), make(kind), tokens_of(2, 9)
    qshard.fuse_(model)
    got = step(model, tokens)
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        assert_bits(step(model, tokens), got)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    compiled = step(model, tokens, torch.compile(model, fullgraph=True, backend="inductor"))
    assert_near(compiled, step(plain, tokens), 1e-4)
    for one in (model, plain):  # SDPA has none to give out
        one.set_attn_implementation("eager")
    outputs = [one(input_ids=tokens, output_attentions=True).attentions for one in (model, plain)]
    assert len(outputs[0]) == 2
    torch.testing.assert_close(*outputs)


def test_layers_and_attentions_keep_the_names_of_their_classes():
    """By which accelerate finds what to wrap, and device maps what not to split."""
    model = make("llama")
    qshard.fuse_(model)
    (name,) = model._no_split_modules
    kind = get_module_class_from_name(model, name)
    assert all(type(layer) is kind for layer in model.model.layers)
    for name in ("LlamaAttention", "LlamaMLP", "LlamaRMSNorm"):
        assert get_module_class_from_name(model, name).__name__ == name


def test_attention_takes_the_arguments_that_it_took():
    plain = make("llama").eval().model
    model = copy.deepcopy(plain)
    qshard.fuse_(model)
    x = torch.randn(2, 5, 32)
    cos_sin = plain.rotary_emb(x, torch.arange(5)[None])
    one, other = (m.layers[0].self_attn for m in (model, plain))
    for args, kwargs in (
        ((x, cos_sin, None), {}),
        ((x,), {"position_embeddings": cos_sin}),
        ((), {"hidden_states": x, "position_embeddings": cos_sin, "attention_mask": None}),
    ):
        torch.testing.assert_close(one(*args, **kwargs), other(*args, **kwargs))
    for args, kwargs in (
        ((x,), {}), ((), {}), ((x, cos_sin), {"hidden_states": x}),
        ((x, cos_sin, None, None, 1), {}),
    ):
        with pytest.raises(TypeError):
            other(*args, **kwargs)
        with pytest.raises(TypeError):
            one(*args, **kwargs)


# ----------------------------------------------------------------------------- what is left, and why


def file_of(kind):
    return sys.modules[f"transformers.models.{kind}.modeling_{kind}"]


def scaled(function):
    @functools.wraps(function)
    def more(*args, **kwargs):
        y = function(*args, **kwargs)
        return tuple(t * 2 for t in y) if isinstance(y, tuple) else y * 2

    return more


def parts_left(match, unknown):
    """Fuses a model, which warns, and leaves modules of these classes as they compute."""
    plain, model = make("llama"), make("llama")
    with pytest.warns(UserWarning, match=match):
        report = qshard.fuse_(model)
    assert {row.module for row in report} == {n for n in KNOWN if n.startswith("Llama")} - unknown
    assert unknown <= {row.module for row in report.left} or not report.left
    assert all(name in str(report) for name in unknown)
    tokens = tokens_of(2, 9)
    assert_near(step(model, tokens), step(plain, tokens), 1e-4)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "LlamaMLP"])
def test_forwards_of_classes_that_were_replaced(name, monkeypatch):
    """By a decorator that keeps all their names, as well."""
    cls = getattr(file_of("llama"), name)
    monkeypatch.setattr(cls, "forward", scaled(cls.forward))
    parts_left(f"more of class {name} are left as they are: {name}.forward is not the one", {name})


def test_rotary_functions_that_were_replaced(monkeypatch):
    file = file_of("llama")
    monkeypatch.setattr(file, "apply_rotary_pos_emb", scaled(file.apply_rotary_pos_emb))
    match = "LlamaAttention are left as they are: apply_rotary_pos_emb of its file"
    parts_left(match, {"LlamaAttention"})


def test_rotary_functions_that_are_replaced_later(monkeypatch):
    file, (plain, model) = file_of("llama"), (make("llama"), make("llama"))
    qshard.fuse_(model)
    monkeypatch.setattr(file, "apply_rotary_pos_emb", scaled(file.apply_rotary_pos_emb))
    turned, tokens = Turned(monkeypatch), tokens_of(2, 9)
    assert_near(step(model, tokens), step(plain, tokens), 1e-4)
    assert turned.count == 0


@pytest.mark.parametrize("change", ["", "forward", "hook"])
def test_rotary_functions_that_are_modules(change, monkeypatch):
    """As the package `kernels` makes them: one module for all models, whose forward it may
    replace."""
    file = file_of("llama")
    function = file.apply_rotary_pos_emb
    if isinstance(function, nn.Module):
        pytest.skip("needs transformers without `kernels`, which makes the function a module already")

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    module = Func()
    module.forward = module.forward  # as kernelize() does where it has no kernel
    monkeypatch.setattr(file, "apply_rotary_pos_emb", module)
    if change == "":
        turned, (plain, model) = Turned(monkeypatch), (make("llama"), make("llama"))
        assert len(qshard.fuse_(model)) == 9
        assert_near(step(model, tokens_of(2, 9)), step(plain, tokens_of(2, 9)), 1e-4)
        assert turned.count == 4
        return
    if change == "forward":
        module.forward = scaled(function)
    else:
        module.register_forward_hook(lambda m, args, y: tuple(t * 2 for t in y))
    parts_left("apply_rotary_pos_emb of its file is not the one", {"LlamaAttention"})


def test_unknown_versions_are_left(monkeypatch):
    plain, model = make("llama"), make("llama")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.0.dev0")
    match = r"5\.99\.0\.dev0 is not among the versions .*\(5\.23, 5\.24\)"
    with pytest.warns(UserWarning, match=match):
        report = qshard.fuse_(model)
    assert report == [] and len(report.left) == 9
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert {n for n in KNOWN if n.startswith("Llama")} == report.known.keys()


def test_a_file_that_lost_a_class(monkeypatch):
    """As where the package gives its MLP another name."""
    file = file_of("llama")
    monkeypatch.delattr(file, "LlamaMLP")
    match = "modeling_llama has no LlamaMLP, which of transformers is known"
    with pytest.warns(UserWarning, match=match):
        report = qshard.fuse_(nn.Sequential(file.LlamaRMSNorm(8), nn.Linear(8, 8)))
    assert len(report) == 1


def test_subclasses_are_left():
    file = file_of("llama")

    class Clipped(file.LlamaMLP):
        def forward(self, x):
            return super().forward(x).clamp(max=1)

    model = make("llama")
    plain = copy.deepcopy(model)
    for one in (model, plain):
        for layer in one.model.layers:
            layer.mlp.__class__ = Clipped
    report = qshard.fuse_(model)
    assert [row.module for row in report.left] == ["Clipped", "Clipped"]
    assert "it is a subclass of LlamaMLP" in str(report)
    assert_near(step(model, tokens_of(2, 9)), step(plain, tokens_of(2, 9)), 1e-4)


def test_forwards_that_modules_were_given():
    model = make("llama")
    layer = model.model.layers[0]
    layer.mlp.forward = layer.mlp.forward
    report = qshard.fuse_(model)
    assert [(row.name, row.reason) for row in report.left] == [
        ("model.layers.0.mlp", "its forward was replaced on the module")]
    assert len(report) == 8
