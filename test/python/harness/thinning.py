"""Fewer cases of the tests that have many parameters.

A test marked `pairwise` runs in some combinations of its parameters' values: every two values of two
parameters meet in one of them. A test marked `each_value` takes long and runs in fewer: each value of each
parameter is in one of them. What more values together would show needs `pytest --full`, which runs every
combination.
"""

import inspect
import itertools
from collections import Counter

HELP = (
    "run every combination of the parameters of tests marked `pairwise` or `each_value`; without it, they "
    "run in as many as it takes for every two values of two parameters to meet, or for each value to be "
    "there, and the others are not collected"
)
MEETING = {"pairwise": 2, "each_value": 1}  # values that meet, by the mark


def leave_out(config, items):
    """Takes out the cases for which a test's `only_where(predicate)` is false: combinations of parameters that
    mean nothing. The predicate has parameters of the test."""
    left_out = {item for item in items for mark in item.iter_markers("only_where") if not _holds(mark.args[0], item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _holds(predicate, item):
    params = getattr(item, "callspec", None)
    return predicate(*(params.params[name] for name in inspect.signature(predicate).parameters))


def keep_few(config, items):
    """Takes out of the collected tests the cases that the marks do without. A case that
    is named, or chosen by -k, runs."""
    products = {}
    for item in items:
        for mark, size in MEETING.items():
            if item.get_closest_marker(mark):
                key = (size, item.path, item.originalname, _device(item))
                products.setdefault(key, []).append(item)
    left_out = set()
    for (size, *_), product in products.items():
        # A value stands for itself by its identity: what pytest calls its index is the case's number.
        kept = covering(
            [[(name, id(value)) for name, value in item.callspec.params.items()] for item in product],
            size,
        )
        left_out.update(item for i, item in enumerate(product) if i not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _device(item):
    """Cases on the CPU and on CUDA are chosen apart: one of the two is often skipped."""
    params = item.callspec.params
    return getattr(params.get("world"), "device", params.get("device"))


def covering(combinations, size=2):
    """Indices of combinations in which any `size` elements meet that meet in one; the greedy choice. Where
    single elements are all that counts, those that are there most seldom come first: formats are spread over
    the sizes of worlds."""
    size = min(size, len(combinations[0]))
    groups = [set(itertools.combinations(combination, size)) for combination in combinations]
    missing, chosen, uses = set().union(*groups), set(), Counter()

    def worth(i):
        return len(groups[i] & missing), -sum(uses[e] for e in combinations[i]) if size == 1 else 0

    while missing:
        best = max(range(len(groups)), key=worth)
        chosen.add(best)
        missing -= groups[best]
        uses.update(combinations[best])
    return chosen
