"""What print(model) shows of a module with a class of a user's, whose own parameters are quantized."""

import inspect
import weakref

from torch import nn

from qshard import module_state


class ExtraRepr:
    """Stands in the module's __dict__, before the extra_repr of its class, and adds the format to what that gives. It
    holds the module weakly, so that a model is freed when its last user lets it go."""

    def __init__(self, module: nn.Module):
        self.module = weakref.ref(module)
        self.of_user = module.__dict__.get("extra_repr")  # set on the module itself

    def __call__(self) -> str:
        module, own = self.module(), self.of_user
        if module is None:  # a shallow copy of it is shown, as copy.copy makes them
            return own() if own is not None else ""
        if own is None:  # that of the class, which may be a static method
            own = inspect.getattr_static(type(module), "extra_repr").__get__(module, type(module))
        own = own()
        shown = module_state.find(module).shown_format(module)
        return own + shown if own else shown.removeprefix(", ")

    def __getstate__(self):
        return {"module": self.module(), "of_user": self.of_user}

    def __setstate__(self, state):
        module = state["module"]
        self.__dict__.update(state, module=weakref.ref(module) if module is not None else lambda: None)


def show(module: nn.Module) -> None:
    hide(module)
    module.__dict__["extra_repr"] = ExtraRepr(module)


def hide(module: nn.Module) -> None:
    """Undoes `show`."""
    shown = module.__dict__.get("extra_repr")
    if not isinstance(shown, ExtraRepr):
        return
    del module.__dict__["extra_repr"]
    if shown.of_user is not None:
        module.__dict__["extra_repr"] = shown.of_user
