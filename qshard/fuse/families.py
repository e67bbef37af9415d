"""Classes of other packages that fuse_ knows: by file and name, for the versions whose code was
compared. Nothing here imports these packages."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F

from qshard.fuse import attention
from qshard.fuse.activations import add_class, add_holder
from qshard.fuse.attention import Attention
from qshard.fuse.mlps import GatedMLP, PackedMLP
from qshard.fuse.norms import Norm, TorchNorm
from qshard.fuse.part import Part, Reason

Files = dict[str, dict[str, Part]]


@dataclass(frozen=True)
class Package:
    """versions: the files of a minor version. decorators: files whose functions the package puts
    around its own forwards."""

    name: str
    versions: dict[tuple[int, int], Files]
    decorators: tuple[str, ...] = ()

    def version(self) -> tuple[int, int] | None:
        try:
            first, second = sys.modules[self.name].__version__.split(".")[:2]
            return int(first), int(second)
        except (AttributeError, KeyError, ValueError):
            return None

    def files(self) -> Files:
        """Those of the version that is loaded; of the newest, where that version is not known."""
        return self.versions.get(self.version(), self.versions[max(self.versions)])

    def unknown_version(self) -> Reason | None:
        if self.version() in self.versions:
            return None
        known = ", ".join(f"{a}.{b}" for a, b in self.versions)
        version = getattr(sys.modules.get(self.name), "__version__", "of no version")
        return Reason(
            f"{self.name} {version} is not among the versions whose code is known ({known}); "
            "qshard.fuse.register names a class whose code you know",
            warns=True,
        )

    def defines(self, function: Callable, file: dict) -> bool:
        """Whether a function is the one that a file defines, within the package's own
        decorators."""
        for name in self.decorators:
            decorator = sys.modules.get(name)
            if decorator is not None and function.__globals__ is vars(decorator):
                function = function.__wrapped__
        return getattr(function, "__globals__", None) is file


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
_TORCHTITAN = {
    **{f"torchtitan.models.{m}.model.model": _FEED_FORWARD for m in ("llama3", "llama4", "qwen3")},
    "torchtitan.models.moe.moe": _FEED_FORWARD,
}

PACKAGES = {
    "transformers": Package(
        "transformers",
        {(5, 23): _transformers("past_key_values"), (5, 24): _transformers("cache")},
        ("transformers.utils.deprecation",),
    ),
    "torchtitan": Package("torchtitan", {(0, 2): _TORCHTITAN}),
}
TORCH_PARTS = {"RMSNorm": TorchNorm("RMSNorm"), "LayerNorm": TorchNorm("LayerNorm")}


def know_activations() -> None:
    """Makes those of transformers known, if a known version of it is loaded."""
    package, module = PACKAGES["transformers"], sys.modules.get("transformers.activations")
    if module is None or package.unknown_version():
        return
    file = vars(module)
    activations = (("SiLUActivation", add_class, "swiglu"), ("GELUTanh", add_holder, "act"))
    for name, add, known in activations:
        cls = file.get(name)
        if cls is not None and package.defines(cls.forward, file):
            add(cls, known)
