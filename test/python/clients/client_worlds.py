"""accelerate and the Trainer on the ranks of a test's world. FSDP2 they refuse on CPUs; here they are told
that it is what they run."""

import contextlib
import os
from unittest import mock

import torch.distributed as dist


@contextlib.contextmanager
def launched():
    """What a launcher says in the environment."""
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, FSDP_VERSION="2")
    with mock.patch.dict(os.environ, variables, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def use_fsdp2(made, plugin):
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made.state.fsdp_plugin = plugin
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


@contextlib.contextmanager
def accelerator(mode="fsdp2", mixed_precision="no", **plugin):
    """An Accelerator whose prepare() uses DDP or FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with launched():
        made = Accelerator(cpu=True, mixed_precision=mixed_precision)
        if mode == "fsdp2":
            plugin.setdefault("cpu_ram_efficient_loading", False)
            wrapped = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                **plugin,
            )
            if mixed_precision != "no":
                wrapped.set_mixed_precision(mixed_precision)
            use_fsdp2(made, wrapped)
        yield made


@contextlib.contextmanager
def trainers():
    """Lets Trainers made within use DDP, or FSDP2 by their arguments."""
    import accelerate
    import transformers.trainer

    def make(fsdp_plugin=None, **kwargs):
        made = accelerate.Accelerator(**kwargs)
        if fsdp_plugin is not None:
            use_fsdp2(made, fsdp_plugin)
        return made

    with launched(), mock.patch.object(transformers.trainer, "Accelerator", make):
        yield
