"""Weights as inference engines hold them in memory: linears of one input as one, and scales as their GEMMs read them.

Sources: vLLM, model_executor/layers/quantization/fp8.py at 1436674b and utils/quant_utils.py at 01693a61; SGLang,
srt/layers/quantization/fp8_utils.py at 002ed7e4 (transform_scale_ue8m0, of linears and, in
requant_block_scale_ue8m0_for_deepgemm, of experts) and srt/layers/deep_gemm_wrapper/configurer.py, which asks for packed
exponents on Blackwell alone.
"""

from dataclasses import dataclass, field

import torch

# vLLM's packed_modules_mapping of Llama, Qwen and their kin, which SGLang's models share.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROWS = 128  # with one scale
ENGINES = ("vllm", "sglang")
_STACKS = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}


@dataclass
class Fusion:
    """Which entries are one tensor of an engine. mapping: {name: names of the parts}."""

    layout: str
    mapping: dict = field(default_factory=dict)

    def groups(self, entries) -> list[tuple[str, list]]:
        """(name of the one, its entries in order) of all entries, those that are not fused by themselves; the name of a
        weight is that of its module. Raises ValueError for what engines cannot run as one."""
        by_name = {entry.name: entry for entry in entries}
        first = {}
        for entry in entries:
            place, _, suffix = entry.name.rpartition(".")
            parent, _, part = place.rpartition(".")
            for fused, parts in self.mapping.items():
                names = [f"{parent}.{name}.{suffix}".lstrip(".") for name in parts]
                if not entry.part and part == parts[0] and all(name in by_name for name in names):
                    first[entry.name] = f"{parent}.{fused}".lstrip("."), [by_name[name] for name in names]
        stacks = self._stacks(entries)
        first |= stacks
        taken = {entry.name for _, members in first.values() for entry in members}
        result = []
        for entry in entries:
            if entry.name in stacks:
                result.append(stacks[entry.name])
            elif entry.name in first:
                fused, members = first[entry.name]
                self._check(fused, members)
                result.append((fused if members[0].is_quantized else f"{fused}.{entry.name.rpartition('.')[2]}", members))
            elif entry.name not in taken:
                result.append((entry.module if entry.is_quantized else entry.name, [entry]))
        return result

    def _stacks(self, entries):
        """{name of its first entry: (name of an engine's stack, its entries)}: gate and up of each expert, or down."""
        stacks = {}
        for entry in entries if self.layout in ENGINES else ():
            if entry.part:
                place = ".".join(entry.name.split(".")[:-3])
                stacks.setdefault(f"{place}.{_STACKS[entry.part.projection]}".lstrip("."), []).append(entry)
        result = {}
        for name, members in stacks.items():
            for entry in members:
                if entry.shape[0] % ROWS and entry.part.projection != "down_proj":
                    raise ValueError(
                        f"{entry.key} has {entry.shape[0]} rows, and {self.layout} runs it as a part of {name}, whose parts have "
                        f"multiples of {ROWS}"
                    )
            ordered = sorted(members, key=lambda entry: (entry.part.expert, entry.part.projection))
            result[members[0].name] = name, ordered
        return result

    def _check(self, fused, members):
        quantized = [entry.key for entry in members if entry.is_quantized]
        if quantized and len(quantized) < len(members):
            plain = next(entry.key for entry in members if not entry.is_quantized)
            raise ValueError(
                f"{quantized[0]} is quantized and {plain} is plain, which {self.layout} runs as one {fused}; quantize both or "
                "neither, or give `fused` without it"
            )
        if len({tuple(entry.shape[1:]) for entry in members}) > 1:
            raise ValueError(f"{members[0].key} and {members[1].key} have other columns, and cannot be one {fused}")
        for entry in members if quantized else ():
            if entry.shape[0] % ROWS:
                raise ValueError(
                    f"{entry.key} has {entry.shape[0]} rows, and {self.layout} runs it as a part of {fused}, whose parts "
                    f"have multiples of {ROWS}; give `fused` without it for an engine that does not"
                )


def experts_of(name: str, members) -> int:
    """How many experts an engine's stack has; 0 for what is none."""
    if not members[0].part or name.rpartition(".")[2] not in _STACKS.values():
        return 0
    return len({entry.part.expert for entry in members})


def packed_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of `packed_exponents` of a matrix's scales."""
    return rows, -(-columns // (4 * ROWS))


def packed_exponents(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """E8M0 (row blocks, column blocks), or a stack of such, as DeepGEMM reads them on Blackwell: int32 (rows,
    ceil(column blocks / 4)), four exponents in each, the first in the lowest byte, every row with its block's; each matrix
    stored by columns, whose stride is a multiple of 4 elements (16 bytes, for TMA)."""
    exponents = scale.view(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    words = exponents.contiguous().view(torch.int32)
    by_row = words.repeat_interleave(ROWS, -2)[..., :rows, :]
    stored = by_row.new_zeros(*words.shape[:-2], words.shape[-1], rows + -rows % 4)
    stored[..., :rows] = by_row.mT
    return stored.mT[..., :rows, :]
