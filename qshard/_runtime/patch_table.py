"""The table of what loading changes outside qshard; patches.py installs it, and `python
docs/what_loading_installs.py` writes the page that shows it.
"""

from dataclasses import dataclass

TORCH = "https://github.com/pytorch/pytorch/blob/v2.11.0/"
ISSUE = "https://github.com/pytorch/pytorch/issues/"
CPYTHON = "https://github.com/python/cpython/blob/3.11/Lib/"

LIBRARY, PACKAGE, DEBUG = "loading the library", "`import qshard`", "`qshard.debug()`, while it is on"
PROPERTY = "property, which only quantized tensors have"
WRAPS, ADDS, CALLS, FINDER = "wraps", "adds", "calls", "finder"


@dataclass(frozen=True)
class Patch:
    """target: "module:path of an attribute in it". It is also the probe: without that attribute a later version
    of the module is left alone. upstream: the source that makes this necessary, or an issue about it.
    registry: of a call, "module:path" of what it adds to."""

    target: str
    how: str
    reason: str
    upstream: str
    by: str = LIBRARY
    registry: str = ""

    @property
    def module(self):
        return self.target.partition(":")[0]

    @property
    def path(self):
        return self.target.partition(":")[2]


_TENSOR = TORCH + "torch/_tensor.py"
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."
_FSDP_SOURCE = TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel."
_DDP_SOURCE = TORCH + "torch/nn/parallel/distributed.py"
_DCP = "torch.distributed.checkpoint."
_DCP_SOURCE = TORCH + "torch/distributed/checkpoint/"
_OPTIMIZER = "torch.optim.optimizer:"
_OPTIMIZER_SOURCE = TORCH + "torch/optim/optimizer.py"

PATCHES = (
    Patch(
        "torch:Tensor.fsdp_pre_all_gather",
        PROPERTY,
        "FSDP2 finds its all-gather extensions by `hasattr` on the local tensor",
        ISSUE + "137005",
    ),
    Patch(
        "torch:Tensor.fsdp_post_all_gather",
        PROPERTY,
        "as `fsdp_pre_all_gather`",
        _FSDP_SOURCE,
    ),
    Patch(
        "torch:Tensor.__get_tensor_shard__",
        PROPERTY,
        "DTensor asks the local tensor for what DCP writes or fills: it gets plain values",
        TORCH + "torch/distributed/tensor/_api.py",
    ),
    Patch(
        "torch:Tensor._reduce_ex_internal",
        WRAPS,
        "the stock code pickles a storage, which is not all of a quantized tensor: pickles keep the exact planes",
        _TENSOR,
    ),
    Patch(
        "torch:Tensor.__deepcopy__",
        WRAPS,
        "the stock code copies a storage; copies keep the planes and an update that awaits a flush",
        _TENSOR,
    ),
    Patch(
        "torch.distributed._shard.sharded_tensor.api:_SHARDED_OPS",
        ADDS,
        "ShardedTensor finds its `__deepcopy__` by the method of `torch.Tensor` that it found when it was imported",
        TORCH + "torch/distributed/_shard/sharded_tensor/api.py",
    ),
    Patch(
        "torch:Tensor.__copy__",
        ADDS,
        "`copy.copy` shares memory, as of a plain tensor; the stock way, pickling, would copy it. For any other "
        "tensor this does what Python does without it",
        CPYTHON + "copy.py",
    ),
    Patch("torch:Tensor.tolist", WRAPS, "the stock method reads memory directly", _TENSOR),
    Patch("torch:Tensor.new", WRAPS, "the stock method looks up a device by dispatch key", _TENSOR),
    Patch("torch:Tensor.new_tensor", WRAPS, "as `new`", _TENSOR),
    Patch(
        "torch:Tensor.storage",
        WRAPS,
        "without a master it raises, because a typed storage would show codes as values",
        _TENSOR,
    ),
    Patch(
        "torch:Tensor.share_memory_",
        WRAPS,
        "the stock method moves the tensor's storage alone; this one moves all planes",
        _TENSOR,
    ),
    Patch(
        "torch.distributed.tensor._api:DTensor.__create_chunk_list__",
        WRAPS,
        "DCP calls it on every rank that plans a load: all ranks then flush, also those without rows",
        TORCH + "torch/distributed/tensor/_api.py",
    ),
    Patch(
        _DCP + "default_planner:create_default_local_load_plan",
        WRAPS,
        "checkpoints of plain models lack the state of delayed scaling and stochastic rounding; any other "
        "missing key stays an error",
        _DCP_SOURCE + "default_planner.py",
    ),
    Patch(
        _DCP + "state_dict_loader:_load_state_dict",
        WRAPS,
        "a load flushes the parts of tensor-parallel weights, because all of their ranks take part in it",
        _DCP_SOURCE + "state_dict_loader.py",
    ),
    Patch(
        _DCP + "_state_dict_stager:StateDictStager._offload_tensor",
        WRAPS,
        "`async_save` copies through `data_ptr()`, which only tensors with a master have",
        _DCP_SOURCE + "_state_dict_stager.py",
    ),
    Patch(
        _DCP + "state_dict:_init_optim_state",
        WRAPS,
        "DCP makes up an optimizer step to have states to load into, and that step must move no amax history and "
        "no count",
        _DCP_SOURCE + "state_dict.py",
    ),
    Patch(
        _DDP + "__init__",
        WRAPS,
        "DDP would copy rank 0's amax histories, which are buffers, over those of the others before each forward. "
        "With histories an object also gets a `join_hook` that raises, because ranks agree in each step",
        _DDP_SOURCE,
    ),
    Patch(
        _DDP + "__setstate__",
        WRAPS,
        "copies of parameters agree with no other rank, and those of a copied DDP do",
        _DDP_SOURCE,
    ),
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
        WRAPS,
        "FSDP1 would flatten quantized parameters into plain ones, or fail without a reason",
        TORCH + "torch/distributed/fsdp/_flat_param.py",
    ),
    Patch(
        _FSDP_PARAM + "_init_sharded_param",
        WRAPS,
        "FSDP2 makes a rank's shard by `new_zeros` and says nowhere whose rows it holds, nor to its all-gather "
        "hooks whether `replicate()` made the parameter. Weights that stay plain learn that they are cut",
        _FSDP_SOURCE,
    ),
    Patch(_FSDP_PARAM + "reset_sharded_param", WRAPS, "as `_init_sharded_param`", _FSDP_SOURCE),
    Patch(
        _FSDP_PARAM + "shard_mesh",
        WRAPS,
        "torch 2.11 slices the mesh of HSDP in Python at each gather of a parameter with all-gather hooks, which takes "
        "longer the more ranks there are; each mesh is sliced once, as torch 2.15 does",
        _FSDP_SOURCE,
    ),
    Patch(
        _FSDP_PARAM + "all_gather_inputs",
        WRAPS,
        "every gather begins by comparing what the ranks know to be written",
        _FSDP_SOURCE,
        by=DEBUG,
    ),
    Patch(
        "transformers.modeling_utils:PreTrainedModel.get_memory_footprint",
        WRAPS,
        "it multiplies elements by the size of their dtype; a quantized weight occupies codes and scales, and a "
        "master if it has one",
        "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_utils.py",
    ),
    Patch(
        "sys:meta_path[0]",
        FINDER,
        "wraps what this table names in modules that are imported later: importing them early would cost every "
        "user their time",
        CPYTHON + "importlib/_bootstrap.py",
    ),
    Patch(
        "sys:meta_path[-1]",
        FINDER,
        "stands in for the `qshard` package where only the library is there, because pickle imports the parent of "
        "`qshard.serialization`",
        CPYTHON + "pickle.py",
    ),
    Patch(
        _OPTIMIZER + "register_optimizer_step_pre_hook",
        CALLS,
        "a step may be a part of another one, which flushes for both (`ZeroRedundancyOptimizer`)",
        _OPTIMIZER_SOURCE,
        registry=_OPTIMIZER + "_global_optimizer_pre_hooks",
    ),
    Patch(
        _OPTIMIZER + "register_optimizer_step_post_hook",
        CALLS,
        "one flush after each `optimizer.step()`, over that optimizer's quantized parameters and those that are "
        "quantized at each use",
        _OPTIMIZER_SOURCE,
        registry=_OPTIMIZER + "_global_optimizer_post_hooks",
    ),
    Patch(
        _OPTIMIZER + "Optimizer.profile_hook_step",
        WRAPS,
        "torch calls no hook after a step that raised: the `step` of each class notes its end. Classes whose "
        "`step` torch has wrapped before get it when the library is loaded",
        _OPTIMIZER_SOURCE,
    ),
    Patch(
        "torch.serialization:add_safe_globals",
        CALLS,
        "`torch.load(weights_only=True)` refuses functions that it does not know",
        TORCH + "torch/_weights_only_unpickler.py",
        registry="torch._weights_only_unpickler:_marked_safe_globals_set",
    ),
    Patch(
        "torch.serialization:_legacy_load",
        WRAPS,
        "files in the legacy format have their bytes behind the pickle: quantized tensors are filled after it",
        TORCH + "torch/serialization.py",
    ),
    Patch(
        "multiprocessing.reduction:ForkingPickler.register",
        CALLS,
        "queues, DataLoader workers and spawned processes share the memory of all planes",
        TORCH + "torch/multiprocessing/reductions.py",
        registry="multiprocessing.reduction:ForkingPickler._extra_reducers",
    ),
    Patch(
        "torch:_C._dynamo.guards._reinterpret_tensor",
        WRAPS,
        "Inductor's code makes views by it, which would have a quantized tensor's key and none of its codes",
        TORCH + "torch/csrc/inductor/inductor_ops.cpp",
    ),
    Patch(
        "os:register_at_fork",
        CALLS,
        "a fork waits for a thread that is importing this Python: in the child no thread would finish it",
        CPYTHON + "importlib/_bootstrap.py",
    ),
    Patch(
        "torch.nn:Module._apply",
        WRAPS,
        "`.to()`, `.float()`, `.to_empty()` and so on call it, and it would make quantized parameters plain and "
        "replace the `Parameter`, untied. It first tries what it is given on an empty tensor, so that `.double()` "
        "is an error before anything is changed",
        TORCH + "torch/nn/modules/module.py",
        by=PACKAGE,
    ),
    Patch(
        "torch.nn.modules.module:register_module_parameter_registration_hook",
        CALLS,
        "a plain tensor or DTensor that a framework registers in the place of a quantized parameter is refused; "
        "an assigned plain parameter is taken, with a warning where the module does not quantize it at each use",
        TORCH + "torch/nn/modules/module.py",
        by=PACKAGE,
        registry="torch.nn.modules.module:_global_parameter_registration_hooks",
    ),
)
