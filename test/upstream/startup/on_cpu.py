"""Lets tests that are written for GPUs run on CPU, in as many processes."""

import functools

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_device_type, common_distributed, common_fsdp

WORLD_SIZE = 2


def run_always(*args, **kwargs):
    """In place of a decorator that skips."""
    return lambda function: function


def with_defaults(make, **defaults):
    @functools.wraps(make)
    def made(self, *args, **kwargs):
        return make(self, *args, **{**defaults, **kwargs})

    return made


def without_device_ids(make):
    @functools.wraps(make)
    def made(self, *args, device_ids=None, **kwargs):
        return make(self, *args, **kwargs)

    return made


def for_cpu(instantiate):
    @functools.wraps(instantiate)
    def instantiated(test_class, scope, except_for=None, only_for=None, **kwargs):
        return instantiate(test_class, scope, only_for=("cpu",))

    return instantiated


def skip(self):
    self.skipTest("torch's backward ends the process where ranks are threads, on CPU")


common_distributed.skip_if_lt_x_gpu = run_always
common_fsdp.FSDPTestMultiThread.setUp = skip
common_distributed.requires_nccl = run_always
common_device_type.instantiate_device_type_tests = for_cpu(
    common_device_type.instantiate_device_type_tests
)
common_fsdp.DEVICE_COUNT = common_fsdp.FSDPTestContinuous.world_size = WORLD_SIZE
torch.accelerator.device_count = lambda: 8  # of which tests want fewer
torch.cpu.device_count = lambda: WORLD_SIZE
torch.cpu.Stream.synchronize = lambda self: None
torch.Tensor.pin_memory = lambda self, device=None: self.clone()
FullyShardedDataParallel.__init__ = with_defaults(
    FullyShardedDataParallel.__init__, device_id=torch.device("cpu")
)
DistributedDataParallel.__init__ = without_device_ids(DistributedDataParallel.__init__)
