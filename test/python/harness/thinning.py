"""Fewer cases of the tests that have many parameters.

A test marked `pairwise` runs in some combinations of its parameters' values: every two values of two
parameters meet in one of them, and so every value of each parameter is there. What only three values
together would show needs `pytest --full`, which runs every combination.
"""

import inspect
import itertools

HELP = (
    "run every combination of the parameters of tests marked `pairwise`; without it, they run in as "
    "many as it takes for every two values of two parameters to meet, and the others are not collected"
)


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


def keep_pairs(config, items):
    """Takes out of the collected tests what every two values do without. A case that
    is named, or chosen by -k, runs."""
    products = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            products.setdefault((item.path, item.originalname, _device(item)), []).append(item)
    left_out = set()
    for product in products.values():
        # A value stands for itself by its identity: what pytest calls its index is the case's number.
        kept = covering(
            [[(name, id(value)) for name, value in item.callspec.params.items()] for item in product]
        )
        left_out.update(item for i, item in enumerate(product) if i not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _device(item):
    """Cases on the CPU and on CUDA are chosen apart: one of the two is often skipped."""
    params = item.callspec.params
    return getattr(params.get("world"), "device", params.get("device"))


def covering(combinations):
    """Indices of combinations in which every two elements meet that meet in any; the greedy choice."""
    size = min(2, len(combinations[0]))
    pairs = [set(itertools.combinations(combination, size)) for combination in combinations]
    missing = set().union(*pairs)
    chosen = set()
    while missing:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
