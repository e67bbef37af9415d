"""Operators as Python functions."""

import functools

import torch


def operator(function):
    """Makes a function that has an operator's name, signature and docstring call that operator. The schema
    (ops/schemas.cpp) has the same arguments and defaults."""
    call = getattr(torch.ops.qshard, function.__name__)

    @functools.wraps(function)
    def run(*args, **kwargs):
        return call(*args, **kwargs)

    return run
