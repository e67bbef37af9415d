"""The library's classes, which are listed in ops/classes.cpp: what Python reads and changes of a quantized
tensor beside its value, and of the process. Their functions are no operators, because no schema can declare
what they read and change, so that a compiler could drop or reorder them."""

import torch

TensorState = torch.classes.qshard.TensorState
SavedTensor = torch.classes.qshard.SavedTensor
Process = torch.classes.qshard.Process
Watch = torch.classes.qshard.Watch
