"""Jobs of torchtitan 0.3 on CPUs, as its trainer makes them of a configuration."""

import contextlib
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from dist_helpers import shared_folder
from models.weights import different, local, local_values
from safetensors.torch import load_file
from titan_stand_ins import (
    Nothing,
    cpu_as_accelerator,
    histc_of_integers,
    late_stager,
    step_is_near,
)
from torch.distributed.fsdp import FSDPModule

from qshard.model.quantize import is_quantized
from qshard.model.state_buffers import without_wrappers

SEQUENCE = 32
TABLE = {"tok_embeddings.weight"}
FLAVORS = {"qwen3": ("qwen3_moe_debug", "debugmodel_moe")}  # others have a debugmodel


@contextlib.contextmanager
def on_cpu():
    """torchtitan is imported under this."""
    with cpu_as_accelerator():
        import torchtitan.trainer  # noqa: F401
        from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: F401

        import qshard.integrations.torchtitan  # noqa: F401
        yield


def configured(model, quantization=None, **sections):
    """A configuration of one of torchtitan's models, as docs/clients.md has it. quantization: what
    QShardConverter is given, None for a plain model. sections: parallelism=dict(…), and the like."""
    with on_cpu():
        import importlib

        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

        from qshard.integrations.torchtitan import QShardConverter, qshard_parallelize

    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    function, flavor = FLAVORS.get(model, (f"{model}_debugmodel", "debugmodel"))
    config = getattr(registry, function)()
    converters = None if quantization is None else [QShardConverter.Config(**quantization)]
    config.model_spec = registry.model_registry(flavor, converters=converters)
    if quantization is not None:
        config.model_spec.parallelize_fn = qshard_parallelize(config.model_spec.parallelize_fn)
    del config.model_spec.model.layers[2:]
    # FlexAttention has no backward on CPUs.
    for _, _, parent, attribute in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    config.training.seq_len, config.training.steps = SEQUENCE, 10
    config.training.disable_cuda_graphs = True
    config.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    config.activation_checkpoint = None
    for section, values in sections.items():
        if not isinstance(values, dict):
            setattr(config, section, values)
            continue
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    return config


class Job:
    """What torchtitan.trainer.Trainer makes of a configuration, without its GPU metrics and data."""

    def __init__(self, config, folder, seed=0, dims=None):
        """dims: of another job, whose meshes DTensor's caches hold: FSDP2 takes no others that are equal."""
        from torchtitan.components.loss import ChunkedLossWrapper
        from torchtitan.distributed import ParallelDims, utils

        self.config, spec = config, config.model_spec
        self.dims = dims or ParallelDims.from_config(config.parallelism, dist.get_world_size())
        if dims is None:
            self.dims.build_mesh()
        utils.set_spmd_backend(config.parallelism.spmd_backend)
        spec.model.update_from_config(config=config)
        torch.manual_seed(seed)
        with torch.device("meta"):
            self.model = spec.model.build()
        self.model.verify_module_protocol()
        self.loss_fn = config.loss.build(compile_config=config.compile)
        self.model = spec.parallelize_fn(
            self.model,
            parallel_dims=self.dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder=str(folder),
        )
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum with a factor
                module.set_force_sum_reduction_for_comms(True)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.model.train()
        if isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(self.model.lm_head)
            self.model._skip_lm_head = True
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(self.optimizers, [self.model], self.dims)
        self.schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=10)
        adapter = spec.state_dict_adapter
        self.checkpoints = config.checkpoint.build(
            dataloader=Nothing(), model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={},
            sd_adapter=adapter(spec.model, None) if adapter else None, base_folder=str(folder),
        )
        self.context = utils.get_spmd_context(parallel_dims=self.dims, spmd_typechecking=False)

    def batch(self, step):
        """Tokens of the rank's part of the data: ranks of tensor parallelism have the same."""
        rank = self.dims.get_mesh("batch").get_local_rank() if self.dims.dp_enabled else 0
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(2048, (2, SEQUENCE + 1), generator=generator)

    @mock.patch("torch.distributed.all_to_all", lambda *args, **kwargs: all_to_all(*args, **kwargs))
    @histc_of_integers()
    def train(self, steps):
        from torchtitan.distributed import utils
        from torchtitan.distributed.spmd_types import annotate_input_spmd_types

        losses = []
        for step in steps:
            tokens = self.batch(step)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            ranks = self.dims.get_mesh("batch").size() if self.dims.dp_enabled else 1
            valid = torch.tensor(labels.numel() * ranks)
            if self.config.parallelism.spmd_backend == "spmd_types":
                inputs, labels, _ = annotate_input_spmd_types(self.dims, inputs, labels, {})
            with self.context():
                loss, _ = self.loss_fn(self.model(inputs), labels, valid)
                loss.backward()
            norm = utils.clip_grad_norm_(
                list(self.model.parameters()), 1.0, foreach=True, ep_enabled=self.dims.ep_enabled
            )
            step_is_near.set()
            self.checkpoints.maybe_wait_for_staging()
            step_is_near.clear()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            losses.append((loss.item(), float(norm)))
        return losses

    def plain_names(self):
        """Names of the weights of linears, and of experts, that are not quantized."""
        return {
            without_wrappers(name)
            for name, parameter in self.model.named_parameters()
            if parameter.dim() > 1 and not is_quantized(parameter)
        }


def stay_plain(job):
    names = (without_wrappers(name) for name, _ in job.model.named_parameters())
    return TABLE | {name for name in names if name.endswith("gate.weight")}


def all_to_all(outputs, inputs, group=None, async_op=False):
    """All-to-all of parts of several sizes, as tokens of experts are; gloo's own takes lists of one size alone."""
    assert not async_op
    flat = torch.cat([part.reshape(-1) for part in inputs])
    received = flat.new_empty(sum(part.numel() for part in outputs))
    sizes = [[part.numel() for part in parts] for parts in (outputs, inputs)]
    dist.all_to_all_single(received, flat, *sizes, group=group)
    for part, values in zip(outputs, received.split(sizes[0])):
        part.copy_(values.view_as(part))


def trains_beside_a_plain_twin(model, quantization, steps, sections):
    with shared_folder() as folder:
        job = Job(configured(model, quantization=quantization, **sections), folder)
        plain = Job(configured(model, **sections), folder, dims=job.dims)
        assert job.plain_names() == stay_plain(job)
        losses, twins = job.train(range(steps)), plain.train(range(steps))
        assert job.plain_names() == stay_plain(job)
        return losses, twins


def assert_close(results, of_loss):
    for losses, twins in results:
        losses, twins = (torch.tensor(values)[:, 0] for values in (losses, twins))
        assert torch.isfinite(losses).all()
        assert not torch.equal(losses, twins)
        torch.testing.assert_close(losses, twins, rtol=of_loss, atol=0)


def resumes(model, quantization, sections):
    with shared_folder() as folder, late_stager():
        first = Job(configured(model, quantization=quantization, **sections), folder)
        losses = first.train(range(2))
        first.checkpoints.save(2)
        losses += first.train(range(2, 4))
        first.checkpoints.maybe_wait_for_saving()
        dist.barrier()
        config = configured(model, quantization=quantization, **sections)
        second = Job(config, folder, seed=1, dims=first.dims)
        assert second.checkpoints.load(2)
        assert second.train(range(2, 4)) == losses[2:]
        assert not different(local_values(first.model), local_values(second.model))
        assert second.plain_names() == stay_plain(second)
        return losses


def exports(model, quantization, sections):
    """The last checkpoint as Hugging Face's files, which models that are plain and quantized load."""
    policy = {"last_save_in_hf": True, "last_save_model_only": True, "initial_load_in_hf": True}
    with shared_folder() as folder:
        config = configured(model, quantization=quantization, checkpoint=policy, **sections)
        first = Job(config, folder)
        first.train(range(2))
        first.checkpoints.save(2, last_step=True)
        dist.barrier()
        files = folder.rglob("*.safetensors")  # of each rank, and all in one
        names = {name for file in files for name in load_file(file)}
        policy = {**policy, "initial_load_path": f"{folder}/checkpoint/step-2"}
        for again in (None, quantization):
            config = configured(model, quantization=again, checkpoint=policy, **sections)
            other = Job(config, f"{folder}/other", seed=1, dims=first.dims)
            assert other.checkpoints.load()
            assert different(shown_values(first), shown_values(other)) == []
        assert other.plain_names() == stay_plain(other)
        return names


def shown_values(job):
    """Copies of a rank's parts of what the model's state_dict has, but of buffers, which qwen3's adapter
    leaves out. Projections of queries, keys and values are one weight, and three of the state_dict."""
    buffers = {without_wrappers(name) for name, _ in job.model.named_buffers()}
    state_dict = job.model.state_dict().items()
    return {name: local(value) * 1 for name, value in state_dict if name not in buffers}


def trains_compiled(model, sections, of_loss=1e-4):
    with shared_folder() as folder:
        quantization = {"recipe": "float8_blockwise"}
        eager = Job(configured(model, quantization=quantization, **sections), folder)
        losses = eager.train(range(2))
        counters = torch._dynamo.utils.counters
        counters.clear()
        options = {"enable": True, "backend": "inductor", "components": ["model"]}
        config = configured(model, quantization=quantization, compile=options, **sections)
        job = Job(config, folder, dims=eager.dims)
        got = job.train(range(2))
        assert counters["stats"]["unique_graphs"] > 0
        assert job.plain_names() == stay_plain(job)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=of_loss, atol=0)
