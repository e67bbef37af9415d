"""QuantizationState."""

import contextlib

import torch

from qshard._runtime.hooks import holds_codes, local_of
from qshard.checkpoint import saved_scales
from qshard.model.quantize import flush
from qshard.model.state_buffers import has_buffers, link, tensors_of, weights, without_wrappers

ops = torch.ops.qshard


class QuantizationState:
    """What models remember between steps beside their weights, as an object with a `state_dict` of
    its own: amax histories of delayed scaling, counts of stochastic rounding. For models quantized
    with `persistent_state=False`, whose own state_dict then has the names of the plain model.

    Whatever saves objects that have a `state_dict` takes it: DCP, Accelerator's
    register_for_checkpointing, torch.save of its state_dict(). All ranks hold the same values, but of
    stacks of experts on an expert mesh, whose ranks agree on nothing: there each rank has rows of a DTensor,
    which is loaded on as many ranks of that mesh.

    models: quantized ones; or parts of one, whose parameters have different names.
    scales: save the scales of weights without a master, too, with which their values come back as
        the same codes: <module>.<weight>_scale_inv, uint8 of single rows, sharded as the weight, or
        fp32, and <weight>_tensor_scale_inv of NVFP4. For matrices, plain, sharded or cut by tensor
        parallelism between scale blocks: others are a NotImplementedError. Both methods are then
        collectives of all ranks of the models' meshes.
    """

    def __init__(self, *models: torch.nn.Module, scales: bool = False):
        self.models = models
        self.scales = scales

    def state_dict(self) -> dict[str, torch.Tensor]:
        """<module>.<weight>_<state>: the tensors themselves, fp32 and int64, and copies of scales;
        empty if the formats have no state."""
        return {**self._state_tensors(), **self._scale_planes()}

    def _scaled_weights(self):
        """{name: weight} of the weights whose scales are saved."""
        if not self.scales:
            return {}
        return {
            without_wrappers(f"{prefix}.{name}".lstrip(".")): weight
            for model in self.models
            for prefix, module in model.named_modules()
            for name, weight in weights(module)
            if isinstance(weight, torch.Tensor) and saved_scales.has_own_scales(weight)
        }

    def _scale_planes(self):
        if not self.scales:
            return {}
        own, ranks = self._scaled_weights(), saved_scales.ranks_of(self.models)
        boxes = saved_scales.places_of(own, ranks)
        for model in self.models:
            flush(model)
        return saved_scales.planes(own, ranks, boxes)

    def _restores(self, own, state_dict, ranks):
        """What brings back the codes of the weights `own`, checked on all ranks before anything is changed."""
        boxes = saved_scales.places_of(own, ranks)
        parts = "scale_inv", "tensor_scale_inv"
        restores = []
        with ranks.agreeing():
            for name, weight in own.items():
                given = {p: state_dict[f"{name}_{p}"] for p in parts if f"{name}_{p}" in state_dict}
                restores.append(saved_scales.Restore(name, weight, given, boxes[name], ranks.rank))
            finite = [restore.is_finite() for restore in restores]
        everywhere = [all(of_ranks) for of_ranks in zip(*ranks.all(finite))]
        restores = [restore for restore, take in zip(restores, everywhere) if take]
        with ranks.agreeing():
            for restore in restores:
                restore.check()
        return restores

    def _state_tensors(self):
        result = {}
        for prefix, module in self._modules():
            link(module)
            for name, tensor in tensors_of(module).items():
                result[without_wrappers(f"{prefix}.{name}".lstrip("."))] = tensor
        return result

    def _modules(self):
        for model in self.models:
            for prefix, module in model.named_modules():
                if has_buffers(module):
                    yield prefix, module

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Loads what `state_dict` gave; after the model's own load_state_dict, which may replace its
        weights, and on all ranks. Raises ValueError, before anything is changed, for missing and
        unexpected names and for other shapes; with `scales` on all ranks, whichever it is on."""
        states, scaled = self._state_tensors(), self._scaled_weights()
        ranks = saved_scales.ranks_of(self.models) if self.scales else None
        with ranks.agreeing() if ranks else contextlib.nullcontext():
            self._check(state_dict, states, scaled)
        with torch.no_grad():
            restores = self._restores(scaled, state_dict, ranks) if ranks else []
            for name, tensor in states.items():
                if tensor is not state_dict[name]:
                    tensor.copy_(state_dict[name])
            # Codes may have been made of the loaded weights since, by a scale of the state before.
            for _, module in self._modules():
                for _, weight in weights(module):
                    if holds_codes(local_of(weight)):
                        ops._mark_written(local_of(weight))
            for restore in restores:
                restore()

    @staticmethod
    def _check(state_dict, states, scaled):
        own = {name: tensor.shape for name, tensor in states.items()}
        for name, weight in scaled.items():
            own |= {f"{name}_{part}": shape for part, shape in saved_scales.shapes(weight).items()}
        wrong = sorted(own.keys() ^ state_dict.keys())
        if wrong:
            raise ValueError(
                f"qshard.QuantizationState: {wrong[0]} is {'missing' if wrong[0] in own else 'unexpected'}"
                f" ({len(wrong)} such names in all); the model was saved with another recipe, or is "
                "another one"
            )
        for name, expected in own.items():
            given = state_dict[name]
            if not isinstance(given, torch.Tensor) or given.shape != expected:
                shape = tuple(getattr(given, "shape", ()))
                raise ValueError(
                    f"qshard.QuantizationState: {name} has shape {tuple(expected)} in this model "
                    f"and {shape} in what is loaded"
                )
