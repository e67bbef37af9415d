"""Checkpoints of codes and scales, in the layouts of inference engines. (Checkpoints to go on training
from are `state_dict`s and DCP's, of plain values.)"""

from qshard.checkpoint.load import load_quantized
from qshard.checkpoint.save import save_quantized

__all__ = ["load_quantized", "save_quantized"]
