"""DotProductAttention, MultiheadAttention and rotary embedding against their formulas in float64."""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import assert_bits, on_devices, randomize
from reference import transformer as reference

from qshard import nn

HEADS, CHANNELS, BATCH = 4, 8, 3
MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
         "padding_causal_bottom_right", "arbitrary")


def made(*shape, seed, dtype=torch.float32, device="cpu"):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def inputs(layout, queries, keys, groups=HEADS, dtype=torch.float32, device="cpu", values=CHANNELS):
    def of(length, heads, channels, seed):
        front = (length, BATCH) if layout == "sbhd" else (BATCH, length)
        return made(*front, heads, channels, seed=seed, dtype=dtype, device=device)

    return (of(queries, HEADS, CHANNELS, 1), of(keys, groups, CHANNELS, 2),
            of(keys, groups, values, 3))


def lengths(length):
    return torch.tensor([max(length - 2 * i, 1) for i in range(BATCH)])


def padding(length):
    """(batch, 1, 1, length), True for padding: sequences of decreasing length."""
    return (torch.arange(length) >= lengths(length).view(-1, 1)).view(BATCH, 1, 1, length)


def arbitrary(queries, keys):
    """Some left out, and all of the last query's."""
    left_out = torch.rand(BATCH, 1, queries, keys, generator=torch.Generator().manual_seed(4)) < 0.4
    left_out[..., -1, :] = True
    return left_out


def expected_mask(mask_type, queries, keys, window, bottom_right):
    """bool (batch, 1, queries, keys), element by element."""
    bottom_right = {"causal": False, "padding_causal": False}.get(mask_type, bottom_right)
    bottom_right = True if "bottom_right" in mask_type else bottom_right
    left, right = window or (-1, -1)
    right = 0 if "causal" in mask_type else right
    allowed = torch.zeros(BATCH, 1, queries, keys, dtype=torch.bool)
    for b in range(BATCH):
        own = queries, keys
        if "padding" in mask_type:
            own = lengths(queries)[b].item(), lengths(keys)[b].item()
        for i in range(queries):
            for j in range(keys):
                allowed[b, 0, i, j] = reference.attends(i, j, *own, (left, right), bottom_right)
                if "padding" in mask_type:
                    allowed[b, 0, i, j] &= i < own[0] and j < own[1]
    return allowed & ~arbitrary(queries, keys) if mask_type == "arbitrary" else allowed


def heads_first(x, layout):
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


def expected(layout, tensors, allowed, scale=1 / math.sqrt(CHANNELS), **kwargs):
    """(output, gradients of the tensors) by the formula, of float64 copies."""
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    output = reference.attention(*(heads_first(t, layout) for t in wide), allowed, scale, **kwargs)
    order = (2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)
    output = output.permute(order).flatten(2)
    output.square().sum().backward()
    return output.detach(), [t.grad for t in wide]


def compare(output, tensors, answer, tolerance=1e-5):
    value, grads = answer
    torch.testing.assert_close(output.cpu().double(), value, rtol=tolerance, atol=tolerance)
    output.square().sum().backward()
    for tensor, grad in zip(tensors, grads):
        torch.testing.assert_close(tensor.grad.cpu().double(), grad, rtol=10 * tolerance,
                                   atol=10 * tolerance)


@on_devices
@pytest.mark.pairwise
@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("sizes", [(1, 1), (7, 7), (5, 9), (9, 5)], ids=str)
@pytest.mark.parametrize("layout,groups,recompute", [
    ("sbhd", HEADS, False), ("bshd", 2, False), ("bshd", 1, True), ("sbhd", 2, True)])
@pytest.mark.parametrize("window,bottom_right", [
    (None, None), (None, False), ((2, 0), False), ((2, 1), None), ((2, 1), True)])
@pytest.mark.parametrize("softcap,softmax_type", [
    (0.0, "vanilla"), (0.7, "vanilla"), (0.0, "off-by-one"), (0.7, "learnable")])
def test_attention_is_the_formula(
    device, mask_type, sizes, layout, groups, recompute, window, bottom_right, softcap, softmax_type
):
    queries, keys = sizes
    if "causal" in mask_type and window:
        window = (window[0], 0)
    module = nn.DotProductAttention(
        HEADS, CHANNELS, num_gqa_groups=groups, qkv_format=layout, attn_mask_type=mask_type,
        window_size=window, bottom_right_diagonal=bottom_right, softcap=softcap,
        attention_type="cross", softmax_type=softmax_type, device=device,
    )
    randomize(module)
    tensors = inputs(layout, queries, keys, groups, device=device)
    given = None
    if mask_type == "arbitrary":
        given = arbitrary(queries, keys).to(device)
    elif "padding" in mask_type:
        given = padding(queries).to(device), padding(keys).to(device)
    output = module(*tensors, attention_mask=given, checkpoint_core_attention=recompute)
    sink = None
    if softmax_type != "vanilla":
        learnable = softmax_type == "learnable"
        sink = module.softmax_offset.detach().cpu().double() if learnable else torch.zeros(HEADS)
    allowed = expected_mask(mask_type, *sizes, window, True if bottom_right is None else bottom_right)
    compare(output, tensors, expected(layout, tensors, allowed, softcap=softcap, sink=sink))


@pytest.mark.pairwise
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias", "alibi"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9)], ids=str)
@pytest.mark.parametrize("own_slopes", [False, True])
def test_biases_of_scores(bias_type, mask_type, softcap, sizes, own_slopes):
    queries, keys = sizes
    module = nn.DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask_type,
                                    attention_type="cross", softmax_scale=0.2)
    tensors = inputs("sbhd", queries, keys)
    bias, slopes = made(1, HEADS, queries, keys, seed=9).detach(), None
    arguments = {"core_attention_bias_type": bias_type, "softcap": softcap}
    if bias_type == "alibi":
        slopes = torch.tensor([0.5, 0.25, 0.1, 0.9]) if own_slopes else torch.tensor(
            [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0])
        arguments["alibi_slopes"] = slopes if own_slopes else None
        bias = torch.zeros(BATCH, HEADS, queries, keys)
        for b in range(BATCH):
            own = sizes
            if "padding" in mask_type:
                own = lengths(queries)[b].item(), lengths(keys)[b].item()
            shift = 0 if mask_type == "causal" else own[1] - own[0]
            for i in range(queries):
                for j in range(keys):
                    bias[b, :, i, j] = -slopes * abs(i + shift - j)
    else:
        arguments["core_attention_bias"] = bias
    masks = (padding(queries), padding(keys)) if "padding" in mask_type else None
    output = module(*tensors, attention_mask=masks, **arguments)
    allowed = expected_mask(mask_type, *sizes, None, True)
    answer = expected("sbhd", tensors, allowed, 0.2, softcap=softcap, bias=bias.double(),
                      pre_scale=bias_type == "pre_scale_bias")
    compare(output, tensors, answer)


def test_alibi_slopes_of_other_head_counts():
    from qshard.nn.parts.attention_bias import alibi_slopes

    assert alibi_slopes(6).tolist() == pytest.approx(
        [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    )


def test_bits_of_torch():
    """Where torch's operator says it all, it is what runs."""
    tensors = inputs("bshd", 7, 7, groups=2)
    module = nn.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=2, qkv_format="bshd")
    query, key, value = (t.transpose(1, 2) for t in tensors)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert_bits(module(*tensors), plain.transpose(1, 2).flatten(2))


def test_overrides_and_cumulative_lengths():
    module = nn.DotProductAttention(HEADS, CHANNELS, attention_type="cross", softcap=0.5)
    tensors = inputs("sbhd", 5, 9)
    sums = [F.pad(lengths(n).cumsum(0), (1, 0)).int() for n in (5, 9)]
    output = module(*tensors, attn_mask_type="causal,padding", softcap=0.0, qkv_format="sbhd",
                    cu_seqlens_q=sums[0], cu_seqlens_kv=sums[1])
    compare(output, tensors, expected("sbhd", tensors, expected_mask("padding_causal", 5, 9, None, False)))
    of_self = nn.DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding")
    tensors = inputs("sbhd", 7, 7)
    by_lengths = of_self(*tensors, cu_seqlens_q=F.pad(lengths(7).cumsum(0), (1, 0)))
    assert_bits(by_lengths, of_self(*tensors, attention_mask=padding(7)))
    compare(by_lengths, tensors, expected("sbhd", tensors, expected_mask("padding", 7, 7, None, True)))


def test_packed_inputs_and_channels_of_values():
    module = nn.DotProductAttention(HEADS, CHANNELS)
    query, key, value = inputs("sbhd", 7, 7)
    answer = module(query, key, value)
    for dim in (-3, -2):
        packed = torch.stack([query, key, value], dim)
        assert_bits(module(qkv_layer=packed, qkv_interleave_dim=dim), answer)
        pair = torch.stack([key, value], dim)
        assert_bits(module(query, kv_layer=pair, qkv_interleave_dim=dim), answer)
    other = nn.DotProductAttention(HEADS, (CHANNELS, 6), attn_mask_type="no_mask")
    tensors = inputs("sbhd", 5, 9, values=6)
    compare(other(*tensors), tensors, expected("sbhd", tensors, torch.ones(BATCH, 1, 5, 9).bool()))


def test_dropout_is_for_training_alone():
    module = nn.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.5, softcap=9.0)
    tensors = inputs("sbhd", 7, 7)
    torch.manual_seed(0)
    dropped = module(*tensors)
    torch.manual_seed(0)
    assert_bits(module(*tensors), dropped)
    assert not torch.equal(module(*tensors), dropped)
    module.eval()
    assert_bits(module(*tensors), module(*tensors))
    assert module(*inputs("sbhd", 0, 3)).shape == (0, BATCH, HEADS * CHANNELS)


class Tracker:
    """Megatron-LM's, on CPU."""

    def __init__(self):
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(3).get_state()}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        with torch.random.fork_rng():
            torch.set_rng_state(self.states[name])
            try:
                yield
            finally:
                self.states[name] = torch.get_rng_state()


class GeneratorTracker(Tracker):
    """As TransformerEngine's for CUDA graphs, which keeps generators."""

    def __init__(self):
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(3)}

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        with torch.random.fork_rng():
            torch.set_rng_state(self.states[name].get_state())
            try:
                yield
            finally:
                self.states[name].set_state(torch.get_rng_state())


@pytest.mark.parametrize("kind", [Tracker, GeneratorTracker])
def test_recomputed_dropout_of_a_tracker(kind):
    def run(recompute):
        tracker = kind()
        module = nn.MultiheadAttention(HEADS * CHANNELS, HEADS, attention_dropout=0.5,
                                       get_rng_state_tracker=lambda: tracker)
        randomize(module)
        x = made(7, BATCH, HEADS * CHANNELS, seed=1)
        y = x
        for _ in range(2):  # backward comes when the tracker is elsewhere
            y = module(y, checkpoint_core_attention=recompute)
        before = y.sum()
        results = [y, *(torch.autograd.grad(before, x, retain_graph=True)[0] for _ in range(2))]
        with tracker.fork():
            results.append(torch.rand(4))
        return results

    assert_bits(run(True), run(False))


def test_recomputed_dropout_needs_a_tracker_that_goes_back():
    class ForksOnly:
        def fork(self):
            return contextlib.nullcontext()

    module = nn.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.5, get_rng_state_tracker=ForksOnly)
    tensors = inputs("sbhd", 7, 7)
    module(*tensors)
    with pytest.raises(TypeError, match="a ForksOnly, has no get_states"):
        module(*tensors, checkpoint_core_attention=True)
    module.eval()
    module(*tensors, checkpoint_core_attention=True)


def test_recomputed_attention_under_transforms():
    module = nn.DotProductAttention(HEADS, CHANNELS)
    query, key, value = (t.detach() for t in inputs("sbhd", 7, 7))

    def gradient(recompute):
        return torch.func.grad(
            lambda q: module(q, key, value, checkpoint_core_attention=recompute).square().sum()
        )(query)

    assert_bits(gradient(True), gradient(False))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("softcap,softmax_type", [(0.0, "off-by-one"), (50.0, "vanilla")])
def test_scores_beyond_fp16(softcap, softmax_type, autocast):
    module = nn.DotProductAttention(HEADS, CHANNELS, softcap=softcap, softmax_type=softmax_type)
    tensors = inputs("sbhd", 7, 7)
    with torch.no_grad():
        tensors[0].mul_(1000), tensors[1].mul_(100)
    wide = module(*tensors)
    given = tensors if autocast else [t.detach().half().requires_grad_() for t in tensors]
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        y = module(*given)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), wide, rtol=0.01, atol=0.01)
    y.float().sum().backward()
    assert all(t.grad.isfinite().all() for t in given)


FORWARD_ARGUMENTS = {
    "inference_params": object(), "pad_between_seqs": True, "cu_seqlens_q_padded": torch.zeros(2), "fp8_output": True,
    "score_mod": print, "thd_attention_policies": [], "qkv_format": "thd",
}  # fmt: skip
ARGUMENTS = {"return_max_logit": True, "tp_size": 2, "qkv_format": "thd"}


@pytest.mark.parametrize("argument", FORWARD_ARGUMENTS)
def test_attention_names_the_argument_of_a_forward_that_it_does_not_take(argument):
    module = nn.DotProductAttention(HEADS, CHANNELS)
    with pytest.raises(NotImplementedError, match=f"DotProductAttention: {argument}="):
        module(*inputs("sbhd", 5, 5), **{argument: FORWARD_ARGUMENTS[argument]})


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_attention_names_the_argument_that_it_does_not_take(argument):
    with pytest.raises(NotImplementedError, match=f"DotProductAttention: {argument}="):
        nn.DotProductAttention(HEADS, CHANNELS, **{argument: ARGUMENTS[argument]})


@pytest.mark.parametrize("arguments, error", [
    ({"attn_mask_type": "diagonal"}, "attn_mask_type='diagonal' is none of"),
    ({"attn_mask_type": "arbitrary"}, "needs a bool attention_mask"),
    ({"attn_mask_type": "padding"}, "needs attention_mask, or cu_seqlens_q"),
    ({"attn_mask_type": "padding", "attention_mask": torch.zeros(5, 5)}, "got torch.float32"),
    ({"attn_mask_type": "padding", "attention_mask": (padding(5), padding(5))}, "got 2"),
    ({"window_size": (-2, 0)}, "should be"),
    ({"softcap": -1.0}, "softcap=-1.0"),
    ({"core_attention_bias_type": "post_scale_bias"}, "needs core_attention_bias"),
    ({"core_attention_bias": torch.zeros(1)}, "takes no core_attention_bias"),
])
def test_attention_names_what_does_not_go_together(arguments, error):
    with pytest.raises(ValueError, match=error):
        nn.DotProductAttention(HEADS, CHANNELS)(*inputs("sbhd", 5, 5), **arguments)


@pytest.mark.parametrize("change, error", [
    (lambda q, k, v: (q, k[:, :, :1], v), "key_layer of shape"),
    (lambda q, k, v: (q, k, v.double()), "all one dtype"),
], ids=["heads", "dtypes"])
def test_attention_names_tensors_that_do_not_go_together(change, error):
    with pytest.raises(ValueError, match=error):
        nn.DotProductAttention(HEADS, CHANNELS)(*change(*inputs("sbhd", 5, 5)))


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="no multiple of"):
        nn.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=3)


def test_a_window_after_the_token_is_cut_with_a_warning():
    with pytest.warns(UserWarning, match=r"\(3, 0\) is used"):
        nn.DotProductAttention(HEADS, CHANNELS)(*inputs("sbhd", 5, 5), window_size=(3, 3))


# --------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_the_formula(interleaved, layout, percent, dtype):
    angles = nn.RotaryPositionEmbedding(CHANNELS, percent, interleaved=interleaved)(11, offset=2)
    rotated = int(CHANNELS * percent)
    assert angles.shape == (11, 1, 1, rotated) and angles.dtype == torch.float32
    for c in range(rotated):
        pair = c // 2 if interleaved else c % (rotated // 2)
        expected_angles = (torch.arange(11) + 2) / 10000.0 ** (2 * pair / rotated)
        torch.testing.assert_close(angles[:, 0, 0, c], expected_angles)
    x, _, _ = inputs(layout, 7, 7, dtype=dtype)
    y = nn.apply_rotary_pos_emb(x, angles, layout, interleaved)
    wide = x.detach().double()
    wide = wide if layout == "sbhd" else wide.transpose(0, 1)
    answer = reference.rotary(wide, angles[:, 0, 0].double(), interleaved)
    answer = answer if layout == "sbhd" else answer.transpose(0, 1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), answer, rtol=eps, atol=4e-7)
    with pytest.raises(ValueError, match="rotary_pos_emb of shape"):
        nn.apply_rotary_pos_emb(x, angles[:3], layout)


def test_rotary_interpolation_stretches_positions():
    plain = nn.RotaryPositionEmbedding(8)(16)
    half = nn.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2,
                                      pretrained_max_position_embeddings=8)
    torch.testing.assert_close(half(16), plain / 2)
    torch.testing.assert_close(half(32), nn.RotaryPositionEmbedding(8)(32) / 4)
    on_meta = nn.RotaryPositionEmbedding(8, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        on_meta.reset_parameters()
    assert_bits(on_meta(16), plain)


def test_angles_stay_float32():
    rotary = nn.RotaryPositionEmbedding(8)
    plain = rotary(4096)
    for moved in (plain.to(torch.bfloat16), plain[:4096].to("cpu", torch.float16), plain.to(plain.bfloat16()),
                  plain.to(device="cpu", dtype=torch.bfloat16), plain.to(dtype=torch.float16, copy=True)):
        assert_bits(moved, plain)
    assert plain.to("meta", torch.bfloat16).device.type == "meta"
    assert plain.to(torch.float64).dtype == torch.float64
    assert type(plain.cos()) is type(plain * torch.ones(8)) is torch.Tensor
    assert_bits(copy.deepcopy(plain).to(torch.bfloat16), plain)
    assert_bits(rotary.to(torch.bfloat16)(4096), plain)
    assert_bits(torch.compile(rotary, fullgraph=True, backend="aot_eager")(4096), plain)
    with pytest.raises(TypeError, match="rotary_pos_emb in torch.bfloat16.*cast_forward_inputs=False"):
        nn.apply_rotary_pos_emb(torch.zeros(3, 1, 1, 8), plain.bfloat16())
