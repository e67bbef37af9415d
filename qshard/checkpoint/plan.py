"""What of a model is written or sent, under which names: equal on all ranks, and made before anything is sent."""

import hashlib
from dataclasses import dataclass

import torch

from qshard.checkpoint import engines, files, layouts
from qshard.checkpoint.model import Entry
from qshard.model.scale_groups import siblings

ops = torch.ops.qshard


@dataclass
class Unit:
    """What is put together at once: a weight with its scales, weights quantized together, or a plain tensor."""

    entries: list[Entry]
    tensors: dict  # {name: (dtype, shape)}
    fused: str | None = None  # the name of what the entries are parts of
    experts: int = 0  # of a stack
    is_requantized: bool = False
    writer: int = 0  # of files
    file: int = 0

    @property
    def nbytes(self):
        return sum(files.nbytes(*spec) for spec in self.tensors.values())

    @property
    def is_plain(self):
        return not self.entries[0].is_quantized


class Plan:
    """`product` is what warnings call the values that readers get; `plain_dtype` gives the dtype of an entry that is
    plain; `fusion` says what is one tensor."""

    def __init__(self, entries, boxes, layout, scale_fmt, product, plain_dtype=None, fusion=None):
        self.entries, self.boxes, self.product = entries, boxes, product
        self.plain_dtype = plain_dtype or (lambda entry: entry.tensor.dtype)
        self.scheme, self.warnings, self.units = None, [], []
        self.fusion = fusion or engines.Fusion(layout)
        for entry in self.entries:
            if entry.tensor.is_meta:
                raise ValueError(f"{entry.key} is on the meta device and has no values")
            if entry.is_quantized:
                scheme = layouts.scheme_for(layout, entry.format, scale_fmt)
                if self.scheme not in (None, scheme):
                    raise ValueError(
                        f"{entry.key} has {scheme.family} scaling, others {self.scheme.family}; a "
                        "config names one"
                    )
                self.scheme = scheme
                scheme.check(entry.key, *entry.shape)
        if self.scheme is None:
            raise ValueError("no weight of this model is quantized; qshard.quantize_ does that")
        self.groups = self.fusion.groups(self.entries)
        self._check_names()

    def _check_names(self):
        seen, self._order = set(), []
        for fused, members in self.groups:
            specs = self._specs(fused, members)
            self._order.append((specs, members[0].format if members[0].is_quantized else None))
            for name in specs:
                if name in seen:
                    raise ValueError(f"names gives two tensors of a file the name {name!r}")
                seen.add(name)

    @property
    def order(self) -> str:
        """Equal on ranks that have the same tensors in the same order."""
        return hashlib.sha256(repr(self._order).encode()).hexdigest()

    def _check_scales(self):
        """Raises ValueError for scales that are to be written as exponents, and are none."""
        for entry in self.entries if self.scheme.is_ue8m0 else ():
            if not entry.is_quantized:
                continue
            scale = ops.scale_inv(entry.matrix)
            as_exponents = scale.to(torch.float8_e8m0fnu).float()
            is_exact = bool(((as_exponents == scale) | scale.isnan()).all())
            # A weight that is quantized again has other scales.
            is_again = not self.boxes[entry.key].is_aligned
            if not is_exact or is_again and "fp32_scale" in entry.format:
                raise ValueError(
                    f"{entry.key} has scales that are not powers of two, which scale_fmt='ue8m0' does not "
                    "hold; leave it out, or quantize by Float8BlockScaling(), whose scales are"
                )

    @property
    def packs_exponents(self):
        return self.scheme.is_ue8m0 and self.scheme.layout == "sglang"

    def _specs(self, name, members):
        """{name: (dtype, shape)} of one tensor, or of one weight's, whose rows are those of the members."""
        entry = members[0]
        shape = entry.shape
        if len(members) > 1:
            shape = sum(member.shape[0] for member in members), *shape[1:]
        if not entry.is_quantized:
            return {name: (self.plain_dtype(entry), shape)}
        experts = engines.experts_of(name, members)
        if experts:
            specs = self._matrix_specs(shape[0] // experts, shape[1])
            return {f"{name}_{suffix}": (dtype, (experts, *sizes)) for suffix, (dtype, sizes) in specs.items()}
        return {f"{name}.{suffix}": spec for suffix, spec in self._matrix_specs(*shape).items()}

    def _matrix_specs(self, rows, columns):
        specs = self.scheme.tensors(rows, columns)
        if self.packs_exponents:
            specs[self.scheme.scale] = torch.int32, engines.packed_shape(rows, columns)
        return specs

    def group(self, ranks):
        """Makes the units. A collective, where a layout has tensor scales or exponents."""
        cut = {e.key: e for e in self.entries if not self.boxes[e.key].is_aligned}
        apart = [key for key, entry in cut.items() if entry.part]
        by_tensor_parallelism = [key for key, entry in cut.items() if not entry.part]
        if by_tensor_parallelism:
            self.warnings.append(
                f"{', '.join(by_tensor_parallelism)}: tensor parallelism has cut scale blocks of "
                f"what readers take for one matrix: each is quantized as a whole, and {self.product} "
                "are not those of the model's codes"
            )
        if apart:
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            self.warnings.append(
                f"{apart[0]}{more}: begins inside a scale block of gate and up as one, or is cut inside one by tensor "
                f"parallelism: each is quantized as a whole, and {self.product} are not those of the model's codes"
            )
        together = self._to_requantize(cut, self._tensor_scales(ranks))
        in_group = {e.key: group for group in together for e in group}
        for name, members in self.groups:
            experts = engines.experts_of(name, members)
            if len(members) > 1 or experts:
                is_requantized = any(entry.key in cut for entry in members)
                self.units.append(Unit(members, self._specs(name, members), name, experts, is_requantized))
                continue
            group = in_group.get(members[0].key, members)
            if group[0] is members[0]:
                tensors = {k: v for e in group for k, v in self._specs(e.module, [e]).items()}
                if group[0].is_quantized:
                    self.units.append(Unit(group, tensors, None, 0, len(group) > 1 or group[0].key in cut))
                else:
                    self.units.append(Unit(group, self._specs(name, group)))

    def _tensor_scales(self, ranks):
        """{key: scale} of all ranks' weights, for layouts that have them. Checks scales."""
        if self.scheme.tensor_scale is None and not self.scheme.is_ue8m0:
            return {}
        with ranks.agreeing() as agreement:
            self._check_scales()
            scales = {}
            for entry in self.entries if self.scheme.tensor_scale else ():
                if entry.is_quantized and entry.matrix.shape[0]:
                    scales[entry.key] = ops.tensor_scale_inv(entry.matrix).item()
            agreement.tell(scales)
        return {key: scale for known in reversed(agreement.everywhere) for key, scale in known.items()}

    def _to_requantize(self, cut, scales):
        if self.scheme.tensor_scale is None:
            return []
        by_name = {e.module: e for e in self.entries if e.is_quantized}
        apart, cut_ones = [], []
        for members in siblings(by_name):
            if len({member.shape[1] for member in members}) > 1:
                continue  # not of one input
            if len({scales.get(member.key) for member in members}) > 1:
                apart.append(members)
            elif any(member.key in cut for member in members):
                cut_ones.append(members)  # by itself one might take another scale than the others
        if apart:
            first = ", ".join(e.key for e in apart[0])
            more = f", as {len(apart) - 1} more such groups," if len(apart) > 1 else ""
            self.warnings.append(
                f"{first}{more} have NVFP4 tensor scales of their own, where engines that fuse them read "
                f"one: they are quantized together, and {self.product} are not those of the model's "
                "codes. qshard.quantize_(model, recipe, share_tensor_scale=True), before training, makes the "
                "model train and write one scale"
            )
        return apart + cut_ones
