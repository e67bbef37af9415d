"""Which weights quantize_ takes, and what it says about them."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn as torch_nn
from torch.nn.parameter import is_lazy

from qshard._runtime.hooks import holds_codes, local_of
from qshard import module_state, nn
from qshard.dynamic_weights.modules import weight_identities
from qshard.dynamic_weights.weights import is_flattened
from qshard.experts.known import stack_names, why_not_weight_only

_ADAPTERS = {"lora_A", "lora_B"}
_TABLES = (torch_nn.Embedding, torch_nn.EmbeddingBag)
_log = logging.getLogger("qshard")


def weight_names(module: torch_nn.Module) -> tuple[str, ...]:
    """The parameters of a module itself that quantize_ quantizes."""
    if isinstance(module, nn.base.Initialized):
        return module.weight_names
    return ("weight",) if isinstance(module, torch_nn.Linear) else ()


def is_adapter(name: str) -> bool:
    """Whether a module of this name is one of LoRA's."""
    return bool(_ADAPTERS & set(name.split(".")))


def check_arguments(model, filter_fn, parameter_fn) -> None:
    """Raises TypeError by the argument's name."""
    if not isinstance(model, torch_nn.Module):
        raise TypeError(f"qshard.quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    functions = ("filter_fn", filter_fn, "module, name"), ("parameter_fn", parameter_fn, "parameter, name")
    for name, function, of in functions:
        if function is not None and not callable(function):
            raise TypeError(
                f"qshard.quantize_: {name} must be a function of ({of}) that says whether to quantize, got "
                f"{type(function).__name__}; of a list of names pass lambda _, name: name in names"
            )


class Choice:
    """What quantize_ takes of a model.

    linears: (name, module) of linears and their kin.
    further: (name, module, its name there) of other parameters: the stacks of experts that are known by their class,
        and what parameter_fn chose.
    tied: (name, name of the embedding) of linears that have the weight of an embedding. Without a filter_fn
        they are left as they are: what they would be rounded to is what the embedding looks up.
    """

    def __init__(self, model, filter_fn, parameter_fn, is_dynamic):
        self.model, self.filter_fn, self.parameter_fn = model, filter_fn, parameter_fn
        self.is_dynamic = is_dynamic
        identity = weight_identities(model)
        self.tables = {
            identity(module): (name, module)
            for name, module in model.named_modules()
            if isinstance(module, _TABLES)
        }
        self.linears, self.tied = [], []
        for name, module in model.named_modules():
            if not weight_names(module) or (filter_fn is not None and not filter_fn(module, name)):
                continue
            table = self.tables.get(identity(module)) if "weight" in weight_names(module) else None
            if table is not None:
                self.tied.append((name, table[0]))
                if filter_fn is None:
                    continue
            _refuse_lazy(module, name)
            self.linears.append((name, module))
        stacks = [] if is_dynamic else list(_stacks(model, filter_fn))
        taken = {(id(module), attribute) for _, module, attribute in stacks}
        chosen = _extra_parameters(model, parameter_fn, taken) if parameter_fn is not None else ()
        self.further = [*stacks, *chosen]
        if self.linears or self.further:
            return
        hint = "check filter_fn"
        if self.tied:
            hint = f"{some([n for n, _ in self.tied])} shares its weight with an embedding; {_ASKS}"
        raise ValueError(f"qshard.quantize_: no nn.Linear was chosen; {hint}")

    def say(self, recipe: str, is_rounded_to_nearest: bool, more: Iterable[str] = ()) -> None:
        """Logs what was taken, and warns once of all that may surprise, `more` among it."""
        names = [name for name, _ in self.linears] + [name for name, *_ in self.further]
        _log.info("quantize_: %d modules or parameters as %s: %s", len(names), recipe, some(names, 8))
        said = [*self._of_adapters(), *self._of_tables(is_default=self.filter_fn is None)]
        if self.parameter_fn is None:  # else that is who leaves them plain
            hint = 'weights="dynamic" is of linears' if self.is_dynamic else "parameter_fn chooses others"
            if self.filter_fn is not None and not self.is_dynamic:
                hint = "filter_fn is asked of experts of transformers and torchtitan, and parameter_fn chooses any"
            meant = "parameter_fn=lambda *_: False says that this is meant"
            said += left_plain(self.model, f"{hint}; {meant}", only_stacks=self.filter_fn is not None)
        if is_rounded_to_nearest:
            said.append(
                "weights that are trained have no master and are rounded to the nearest code, which loses "
                "small updates; pass stochastic_rounding=True, or keep the master"
            )
        said += more
        if said:
            warnings.warn("qshard.quantize_: " + ". Also, ".join(said), stacklevel=4)

    def _of_adapters(self):
        adapters = [name for name, _ in self.linears if is_adapter(name)]
        if adapters:
            yield (
                f"{some(adapters)} look like LoRA adapters, small matrices that are trained in full "
                "precision beside frozen weights; leave them out by filter_fn, or quantize the model "
                "before the adapters are added"
            )

    def _of_tables(self, is_default):
        for name, table in self.tied:
            if is_default:
                yield f"{name} was left plain: it shares its weight with the embedding {table}; {_ASKS}"
            else:
                yield (
                    f"{name} shares its weight with the embedding {table}, which now looks up rounded values "
                    "and dequantizes the whole table for it"
                )
        if not is_default:
            return
        # An output layer has the shape of the table of inputs, and there is one of it.
        shapes = [(m.num_embeddings, m.embedding_dim) for _, m in self.tables.values()]
        linears = [(name, m) for name, m in self.linears if isinstance(m, torch_nn.Linear)]
        for rows, columns in dict.fromkeys(shapes):
            alike = [n for n, m in linears if (m.out_features, m.in_features) == (rows, columns)]
            if rows > columns and len(alike) == 1:
                yield (
                    f"{alike[0]}, which has the shape of an embedding table, as output layers have, was "
                    "quantized, too; many recipes leave those plain, which a filter_fn does"
                )


_ASKS = "a filter_fn that takes it quantizes the weight of both"


def _refuse_lazy(module, name):
    if any(is_lazy(parameter) for parameter in module._parameters.values()):
        raise ValueError(
            f"qshard.quantize_: {name or 'the model'}, a {type(module).__name__}, has no shape yet; "
            "materialize it by a forward first, or leave it out"
        )


def _stacks(model, filter_fn) -> Iterator[tuple[str, torch_nn.Module, str]]:
    for prefix, module in model.named_modules():
        names = [n for n in stack_names(module) if not is_flattened(module._parameters[n])]
        if names and (filter_fn is None or filter_fn(module, prefix)):
            for attribute in names:
                yield f"{prefix}.{attribute}".lstrip("."), module, attribute


def _extra_parameters(model, parameter_fn, taken) -> Iterator[tuple[str, torch_nn.Module, str]]:
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            name = f"{prefix}.{attribute}".lstrip(".")
            if parameter is None or weight_names(module) or (id(module), attribute) in taken:
                continue
            if not parameter_fn(parameter, name):
                continue
            _refuse_lazy(module, prefix)
            if parameter.dim() < 2 or is_flattened(parameter):
                raise ValueError(
                    f"qshard.quantize_: parameter_fn chose {name} of shape {tuple(parameter.shape)}; it "
                    "may choose matrices, and stacks of them, that FSDP1 has not flattened"
                )
            yield name, module, attribute


def refuse_weight_only(choice: Choice, multiplies: Callable[[type], bool]) -> None:
    """Raises TypeError where a chosen module would go on to quantize activations. `multiplies`: whether modules of a
    class do as they are told."""
    for name, module in choice.linears:
        if not multiplies(type(module)):
            raise TypeError(
                f"qshard.quantize_: weight_only cannot change how {name}, a "
                f"{type(module).__name__}, multiplies; it needs the forward of nn.Linear"
            )
    for name, module, _ in choice.further:
        why = None if isinstance(module, _TABLES) else why_not_weight_only(module)  # tables look up
        if why is not None:
            raise TypeError(f"qshard.quantize_: weight_only cannot act on {name}: {why}")


def left_plain(model: torch_nn.Module, hint: str, only_stacks: bool = False) -> Iterator[str]:
    """Names parameters like those of linears: experts of (experts, rows, columns), a matrix that a module
    of its own kind multiplies by."""
    left = []
    tables = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, _TABLES)}
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch.nn.") and kind is not torch_nn.MultiheadAttention:
            continue  # convolutions, embeddings, norms, and linears that were left out
        if module_state.dynamic_of(module) is not None:
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or id(parameter) in tables:
                continue
            if holds_codes(local_of(parameter)):
                continue
            if not parameter.is_floating_point():
                continue
            is_stack = parameter.dim() > 2 and parameter.shape[0] > 1
            is_matrix = not only_stacks and parameter.dim() == 2 and attribute.endswith("weight")
            if (is_stack or is_matrix) and min(parameter.shape[-2:]) >= 16:
                left.append(f"{name}.{attribute}".lstrip("."))
    if left:
        yield (
            f"{some(left)} look like weights and were left plain: only those of nn.Linear, and of experts of "
            f"transformers and torchtitan, are quantized. {hint}"
        )


def warn_of_what_is_left(model: torch_nn.Module, hint: str) -> None:
    for said in left_plain(model, hint):
        warnings.warn(f"qshard.quantize_: {said}", stacklevel=3)


def some(names: list[str], count: int = 4) -> str:
    """The first of names, for a message."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
