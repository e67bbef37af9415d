"""What the converters of both versions of torchtitan let users choose."""

from qshard.formats import info_of
from qshard.recipes import RECIPES

_RECIPES = {recipe().format: recipe for recipe in RECIPES}
NAMES = tuple(_RECIPES)


def check(options) -> None:
    """Raises ValueError for a recipe that there is not."""
    if options.recipe not in _RECIPES:
        raise ValueError(
            f"quantize.qshard: recipe must be one of {', '.join(_RECIPES)}, not {options.recipe!r}"
        )


def recipe_of(options):
    """The recipe that a converter's options name."""
    has_history = info_of(options.recipe).amax_history is not None
    more = dict(amax_history_len=options.amax_history_len) if has_history else {}
    return _RECIPES[options.recipe](**more)


def arguments(options) -> dict:
    """What quantize_ is given beside the recipe and which weights to take."""
    return dict(
        keep_master=options.keep_master,
        weight_only=options.weight_only,
        stochastic_rounding=options.stochastic_rounding,
        persistent_state=False,
    )


def is_kept_plain(options, name: str) -> bool:
    return any(part in name for part in options.filter_fqns)
