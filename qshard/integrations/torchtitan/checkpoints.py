"""Histories, rounding counts and scales beside torchtitan's checkpoints of a model, as the state "qshard":
Hugging Face output and state-dict adapters see the plain model's own names."""

import qshard
from qshard import module_state
from torchtitan.components import checkpoint


class _LoadedLast(qshard.QuantizationState):
    """CheckpointManager gives the model its values once more after all states have theirs."""

    given = None

    def load_state_dict(self, state_dict):
        self.given = state_dict

    def finish(self):
        if self.given is not None:
            super().load_state_dict(self.given)
            self.given = None


def checkpoint_beside(manager_type):
    """Converters are not asked what to checkpoint; CheckpointManager saves and loads all `states`."""
    stock_init, stock_load = manager_type.__init__, manager_type.load

    def __init__(self, *args, **kwargs):
        stock_init(self, *args, **kwargs)
        if not hasattr(self, "states"):  # a manager of torchtitan 0.3 that is disabled has none
            return
        parts = self.states[checkpoint.MODEL].model
        states = map(module_state.find, parts)
        scales = any(state.saves_scales for state in states)
        state = _LoadedLast(*parts, scales=scales)
        if state.state_dict():
            self.states["qshard"] = state

    def load(self, *args, **kwargs):
        is_loaded = stock_load(self, *args, **kwargs)
        if "qshard" in getattr(self, "states", ()):
            self.states["qshard"].finish()
        return is_loaded

    manager_type.__init__, manager_type.load = __init__, load
