"""quantized_model_init: modules whose weights are quantized as they are made."""

from collections.abc import Iterator
from contextlib import contextmanager

from qshard.model.choosing import weight_names
from qshard.model.quantize import quantize_
from qshard.nn.base import when_made
from qshard.recipes import recipe_of


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe=None, *, keep_master: bool = True, weight_only: bool = False
) -> Iterator[None]:
    """Modules of `qshard.nn` that are made within have quantized weights, as by `quantize_` after
    their constructor; memory never holds a second plain one. Other modules stay what they are.

    recipe: as for `quantize_`; required where enabled.
    keep_master, weight_only: as for `quantize_`.

    >>> with qshard.quantized_model_init(recipe=qshard.Float8BlockScaling()):
    ...     layer = qshard.nn.LayerNormMLP(64, 256)
    """
    if enabled:
        recipe = recipe_of(recipe, "qshard.quantized_model_init")

    def quantize_new(module):
        if weight_names(module):
            quantize_(
                module, recipe, filter_fn=lambda *_: True, keep_master=keep_master, weight_only=weight_only
            )

    token = when_made.set(quantize_new if enabled else None)
    try:
        yield
    finally:
        when_made.reset(token)
