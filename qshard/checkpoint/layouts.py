"""The layouts: under which names, dtypes and shapes a weight's planes lie in files, and what a config
says of them.

Sources: DeepSeek-V3's inference/README_weights.md; compressed-tensors 0.20, compressors/ and
quantization/quant_scheme.py; nvidia-modelopt 0.47, torch/export/convert_hf_config.py.
"""

from dataclasses import dataclass, field, replace

import torch

from qshard.checkpoint.engines import ENGINES
from qshard.formats import info_of

LAYOUTS = ("deepseek-fp8", "compressed-tensors", "modelopt")
SCALE_FORMATS = ("float", "ue8m0")
_IN_FILES = {torch.float8_e8m0fnu: torch.uint8}  # files of MXFP8 weights have bytes for their scales
# What errors call weights by how a GEMM reads their scales: what formats have in common for a file.
_FAMILIES = {"tensor": "tensor", "row": "channel", "128x128": "block", "1x32": "mxfp8", "1x16": "nvfp4"}


def block_of(format: str) -> tuple[int, int]:
    """Rows and columns with one scale, as far as parts of a tensor have scales of their own: (1, 1) where
    the one scale of a tensor is all there is."""
    scale = info_of(format).scale
    return scale.block_rows or 1, scale.block_cols or 1


@dataclass(frozen=True)
class Scheme:
    """How one layout holds weights of one family: suffixes of names in place of `weight`."""

    layout: str
    family: str
    codes: str = "weight"
    scale: str = "weight_scale"
    tensor_scale: str | None = None
    divides: bool = False  # by tensor_scale: the file has its reciprocal
    scalar: tuple[int, ...] = (1,)  # shape of what is one number
    config: dict = field(default_factory=dict, compare=False)
    ignore: str = "ignore"  # the config's key for modules left plain
    is_ue8m0: bool = False  # fp32 scales as their exponents
    # What the format of the weights says:
    block: tuple[int | None, int | None] = (None, None)  # with one scale in the file; None: all
    scale_dtype: torch.dtype = torch.float32
    codes_per_byte: int = 1
    has_row_scales: bool = False  # which a shard has of its own rows alone

    def check(self, name, rows, columns):
        """Raises ValueError if readers cannot have a weight of this shape."""
        block = (self.block[1] or 1) if self.has_row_scales else 1
        if columns % block:
            raise ValueError(
                f"{name} has {columns} columns; layout {self.layout!r} holds {self.family} weights "
                f"with a multiple of {block}. Leave it plain by quantize_'s filter_fn"
            )

    def block_within(self, rows, columns):
        """Rows and columns with one scale in the file, of a weight of this shape."""
        return tuple(size if block is None else block for block, size in zip(self.block, (rows, columns)))

    def tensors(self, rows, columns):
        """{suffix: (dtype, shape)} in a file."""
        codes = torch.float8_e4m3fn if self.codes_per_byte == 1 else torch.uint8
        scale = _IN_FILES.get(self.scale_dtype, self.scale_dtype)
        scales = self.scalar
        if self.block != (None, None):
            row, column = self.block_within(rows, columns)
            scales = -(-rows // row), -(-columns // column)
        result = {
            self.codes: (codes, (rows, columns // self.codes_per_byte)),
            self.scale: (torch.float8_e8m0fnu if self.is_ue8m0 else scale, scales),
        }
        if self.tensor_scale:
            result[self.tensor_scale] = (torch.float32, self.scalar)
        return result

    def quantization_config(self, ignore):
        """config.json's entry."""
        return {**self.config, self.ignore: ignore}

    def hf_quant_config(self, ignore):
        """What hf_quant_config.json holds; None for layouts without one."""
        if self.layout != "modelopt":
            return None
        quantization = {
            "quant_algo": self.config["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": self.block[1],
            "exclude_modules": ignore,
        }
        return {"producer": {"name": "qshard"}, "quantization": quantization}


def _args(bits, strategy, dynamic=False, **more):
    return dict(num_bits=bits, type="float", strategy=strategy, symmetric=True, dynamic=dynamic, **more)


def _compressed(format, weights, activations):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def _modelopt(quant_algo, bits, group_size, activations):
    def args(dynamic):
        return {"dynamic": dynamic, "num_bits": bits, "type": "float", "group_size": group_size}

    group = {"weights": args(False), "targets": ["Linear"]}
    if activations:
        group["input_activations"] = args(True)
    return {
        "quant_method": "modelopt",
        "quant_algo": quant_algo,
        "config_groups": {"group_0": group},
        "producer": {"name": "qshard"},
    }


# What activations are scaled by is chosen when they are there ("dynamic"). NVFP4 engines want one number
# for all of them, which a model trained here does not have: those weights meet plain activations.
_SCHEMES = [
    Scheme(
        "deepseek-fp8",
        "block",
        scale="weight_scale_inv",
        config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        ignore="modules_to_not_convert",
    ),
    Scheme(
        "compressed-tensors",
        "tensor",
        config=_compressed("float-quantized", _args(8, "tensor"), _args(8, "tensor", True)),
    ),
    Scheme(
        "compressed-tensors",
        "channel",
        config=_compressed("float-quantized", _args(8, "channel"), _args(8, "token", True)),
    ),
    Scheme(
        "compressed-tensors",
        "block",
        config=_compressed(
            "float-quantized",
            _args(8, "block", block_structure=[128, 128]),
            _args(8, "group", True, group_size=128),
        ),
    ),
    Scheme(
        "compressed-tensors",
        "mxfp8",
        config=_compressed(
            "mxfp8-quantized",
            _args(8, "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
            _args(8, "group", True, group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
        ),
    ),
    Scheme(
        "compressed-tensors",
        "nvfp4",
        codes="weight_packed",
        tensor_scale="weight_global_scale",
        divides=True,
        config=_compressed(
            "nvfp4-pack-quantized",
            _args(
                4,
                "tensor_group",
                group_size=16,
                scale_dtype="torch.float8_e4m3fn",
                zp_dtype="torch.float8_e4m3fn",
            ),
            None,
        ),
    ),
    Scheme(
        "modelopt",
        "nvfp4",
        tensor_scale="weight_scale_2",
        scalar=(),
        config=_modelopt("W4A16_NVFP4", 4, 16, activations=False),
    ),
    Scheme("modelopt", "mxfp8", config=_modelopt("MXFP8", 8, 32, activations=True)),
]


def check(layout: str, scale_fmt: str = "float", known=LAYOUTS + ENGINES) -> None:
    """Raises ValueError naming what there is."""
    if layout not in known:
        raise ValueError(f"layout must be one of {', '.join(known)}, not {layout!r}")
    if scale_fmt not in SCALE_FORMATS:
        raise ValueError(f"scale_fmt must be one of {', '.join(SCALE_FORMATS)}, not {scale_fmt!r}")
    if scale_fmt == "ue8m0" and layout not in ("deepseek-fp8", "sglang"):
        have = "'deepseek-fp8' has" if "sglang" not in known else "'deepseek-fp8' and 'sglang' have"
        raise ValueError(f"layout {layout!r} has no scale_fmt {scale_fmt!r}; {have}")


def scheme_for(layout: str, format: str, scale_fmt: str = "float") -> Scheme:
    """How a layout holds weights of a format. Raises ValueError naming what there is."""
    check(layout, scale_fmt)
    is_ue8m0 = scale_fmt == "ue8m0"
    info = info_of(format)
    family, scale = _FAMILIES[info.gemm.scale_mode], info.scale
    of_files = "deepseek-fp8" if layout in ENGINES else layout
    for scheme in _SCHEMES:
        if (scheme.layout, scheme.family) == (of_files, family):
            return replace(
                scheme,
                layout=layout,
                config={**scheme.config, "scale_fmt": scale_fmt} if is_ue8m0 else scheme.config,
                is_ue8m0=is_ue8m0,
                block=(scale.block_rows if scale.place == "grid" else 1, scale.block_cols),
                scale_dtype=scale.dtype,
                codes_per_byte=8 // info.code_bits,
                has_row_scales=scale.place == "rows",
            )
    known = [s.layout for s in _SCHEMES if s.family == family]
    known += ENGINES if layout in ENGINES and "deepseek-fp8" in known else ()
    raise ValueError(
        f"layout {layout!r} has no weights of {family} scaling; those that have are {', '.join(known)}"
    )


def layout_of(config: dict) -> str:
    """The layout that a config.json's `quantization_config` names."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    layouts = {"fp8": "deepseek-fp8", "compressed-tensors": "compressed-tensors", "modelopt": "modelopt"}
    if not isinstance(method, str) or method not in layouts:
        raise ValueError(
            f"config.json's quantization_config has quant_method {method!r}; known are "
            f"{', '.join(layouts)}"
        )
    return layouts[method]
