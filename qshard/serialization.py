"""How pickles of quantized tensors are read back.

`torch.save` and `pickle` write the name of the function that reads a tensor, `qshard.serialization.
rebuild_tensor`, and its arguments. Both are a file format: they only ever grow. The module is there
wherever the library is loaded, with the `qshard` package or without it, because the library embeds this file;
where only the package is installed, unpickling imports it, and it loads the library. Before
`torch.load(weights_only=True)`, which imports nothing, load it yourself.

Files may come from strangers: what they claim is checked against the bytes they hold.
"""

from qshard._runtime.unpickling import rebuild_shared, rebuild_tensor  # noqa: F401

__all__ = ["rebuild_tensor"]
