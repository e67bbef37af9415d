"""What torch.compile does not trace."""

import functools

import torch


def outside_graphs(function):
    """Makes compiled code call `function` between graphs, on the real tensors. It would be traced with fake
    ones, whose dispatch keys do not say that they stand for quantized tensors.

    Elsewhere the function is called as it is, because torch's own way imports torch._dynamo, which takes
    seconds, at the first call."""
    between_graphs = torch._disable_dynamo(function)
    # What torch._dynamo.disable marks its functions with, to say why a graph ends here.
    between_graphs._torchdynamo_disable = True
    between_graphs._torchdynamo_disable_msg = (
        f"qshard.{function.__name__} runs between graphs; with fullgraph=True call it outside the compiled "
        "function"
    )

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (between_graphs if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
