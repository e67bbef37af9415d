"""Checkpoints of codes and scales, in the layouts of inference engines. (Checkpoints to go on training
from are `state_dict`s and DCP's, of plain values.)"""

from qshard.checkpoint.digests import digests, verify
from qshard.checkpoint.ignored import ignored_modules
from qshard.checkpoint.load import load_quantized
from qshard.checkpoint.save import save_quantized
from qshard.checkpoint.stream import quantized_tensors

__all__ = ["digests", "ignored_modules", "load_quantized", "quantized_tensors", "save_quantized", "verify"]
