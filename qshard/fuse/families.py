"""Classes of other packages that fuse_ knows: by file and name, for the versions whose code was
compared. Nothing here imports these packages."""

import torch.nn.functional as F

from qshard.fuse import attention
from qshard.fuse.attention import Attention
from qshard.fuse.mlps import GatedMLP, PackedMLP
from qshard.fuse.norms import Norm, TorchNorm
from qshard.fuse.part import Part, Reason
from qshard.fuse.rotary import RotaryPair
from qshard.fuse.titan_attention import TitanAttention
from qshard.modules.packages import TORCHTITAN, TRANSFORMERS, Package

Files = dict[str, dict[str, Part]]

# ------------------------------------------------------------------------------------ transformers

_NORM = Norm(eps="variance_epsilon")
_GEMMA_NORM = Norm(zero_centered=True, keeps_dtype=True)
_MLP = GatedMLP("gate_proj", "up_proj", "down_proj", "act_fn")


def _transformers(cache: str) -> Files:
    def of(name, norm, mlp, project, options, output="o_proj"):
        kinds = {"RMSNorm": norm, "MLP": mlp}
        kinds["Attention"] = Attention(project, options, output, cache)
        return {f"{name}{kind}": part for kind, part in kinds.items() if part is not None}

    three = attention.three_linears
    packed = PackedMLP("gate_up_proj", "down_proj", "activation_fn")
    models = {
        "llama": of("Llama", _NORM, _MLP, three, attention.nothing),
        "mistral": of("Mistral", _NORM, _MLP, three, attention.window_of_config),
        "qwen2": of("Qwen2", _NORM, _MLP, three, attention.window),
        "qwen3": of("Qwen3", _NORM, _MLP, attention.norms_of_heads, attention.window),
        "gemma": of("Gemma", _GEMMA_NORM, _MLP, three, attention.nothing),
        "gemma2": of("Gemma2", _GEMMA_NORM, _MLP, three, attention.window_and_cap),
        "gemma3": of(
            "Gemma3", _GEMMA_NORM, _MLP, attention.norms_of_transposed_heads, attention.window
        ),
        # Its norms are nn.LayerNorm, and its MLP has no gate.
        "phi": of("Phi", None, None, attention.optional_norms, attention.nothing, "dense"),
        "phi3": of("Phi3", _NORM, packed, attention.one_linear, attention.window_of_config),
    }
    return {f"transformers.models.{m}.modeling_{m}": parts for m, parts in models.items()}


# -------------------------------------------------------------------------------------- torchtitan

# Its norms are nn.RMSNorm.
_FEED_FORWARD = {"FeedForward": GatedMLP("w1", "w3", "w2", F.silu)}
_QWEN3_ATTENTION = TitanAttention(has_norms=True, scale="scaling", is_complex=False)
_TORCHTITAN_0_2 = {
    "torchtitan.models.llama3.model.model": _FEED_FORWARD | {"Attention": TitanAttention()},
    # With masks it is given a dict of them.
    "torchtitan.models.llama4.model.model": _FEED_FORWARD
    | {"Attention": TitanAttention(masked=(), is_optional=True)},
    "torchtitan.models.qwen3.model.model": _FEED_FORWARD | {"Attention": _QWEN3_ATTENTION},
    "torchtitan.models.moe.moe": _FEED_FORWARD,
}
# Its norms are a subclass of nn.RMSNorm, with the forward of that.
_TORCHTITAN_0_3 = {
    "torchtitan.models.common.feed_forward": _FEED_FORWARD,
    "torchtitan.models.common.nn_modules": {"RMSNorm": TorchNorm("RMSNorm")},
    "torchtitan.models.common.rope": {
        name: RotaryPair("cache") for name in ("ComplexRoPE", "CosSinRoPE")
    },
}

# The files of each minor version of a package.
PACKAGES = {
    TRANSFORMERS: {(5, 23): _transformers("past_key_values"), (5, 24): _transformers("cache")},
    TORCHTITAN: {(0, 2): _TORCHTITAN_0_2, (0, 3): _TORCHTITAN_0_3},
}
TORCH_PARTS = {"RMSNorm": TorchNorm("RMSNorm"), "LayerNorm": TorchNorm("LayerNorm")}


def package_of(cls: type) -> Package | None:
    """The package that defines a class, if fuse_ knows classes of it."""
    name = cls.__module__.partition(".")[0]
    return next((package for package in PACKAGES if package.name == name), None)


def files_of(package: Package) -> Files:
    """Those of the version that is loaded; of the newest, where that version is not known."""
    versions = PACKAGES[package]
    return versions.get(package.version(), versions[max(versions)])


def unknown_version(package: Package) -> Reason | None:
    """Why classes of a package are left, where its version was not compared."""
    if package.is_known():
        return None
    text = f"{package.why_unknown()}; qshard.fuse.register names a class whose code you know"
    return Reason(text, warns=True)
