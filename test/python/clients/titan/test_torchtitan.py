"""torchtitan with the converter quantize.qshard: its debug models, optimizers and checkpoints, on two
ranks."""

import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from collective_calls import ExchangedRows
from dist_helpers import on_ranks, shared_folder
from models.weights import different, local_values
from safetensors.torch import load_file
from titan_stand_ins import (
    Nothing,
    cpu_as_accelerator,
    documented,
    histc_of_integers,
    late_stager,
    permutations_on_cpu,
    step_is_near,
)
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import qshard
from qshard.activation_checkpointing import PRODUCTS
from qshard.fuse.classes import is_fused

BUDGET_S = 240  # two processes write each asynchronous checkpoint
RECIPES = ["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4"]


def on_cpu():
    """torchtitan is imported under this."""
    with cpu_as_accelerator():
        import qshard.integrations.torchtitan  # noqa: F401


def with_permutations_on_cpu(function):
    def run(*args, **kwargs):
        with permutations_on_cpu():
            return function(*args, **kwargs)

    return run


class Job:
    """What torchtitan.train.Trainer makes of a job's arguments, without its GPU metrics and data."""

    def __init__(self, folder, *arguments, model="llama3", quantized=True, seed=0):
        on_cpu()
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.config import ConfigManager
        from torchtitan.distributed import ParallelDims
        from torchtitan.protocols.model_converter import build_model_converters
        from torchtitan.protocols.train_spec import get_train_spec

        module = "qshard.integrations.torchtitan"
        converter = ["--model.converters=quantize.qshard"] if quantized else []
        self.config = config = ConfigManager().parse_args(
            [
                f"--job.custom_config_module={module}", f"--job.dump_folder={folder}",
                f"--model.name={model}", "--model.flavor=debugmodel", "--training.seq_len=32",
                "--training.steps=10", "--checkpoint.enable", "--checkpoint.interval=2",
                "--optimizer.implementation=foreach", *converter, *arguments,
            ]
        )
        spec = get_train_spec(config.model.name)
        parallelism = config.parallelism
        self.dims = dims = ParallelDims(
            dp_shard=parallelism.data_parallel_shard_degree,
            dp_replicate=parallelism.data_parallel_replicate_degree,
            cp=1, tp=parallelism.tensor_parallel_degree, pp=1, ep=parallelism.expert_parallel_degree, etp=1,
            world_size=dist.get_world_size(),
        )
        args = spec.model_args["debugmodel"]
        args.update_from_config(config)
        torch.manual_seed(seed)
        with torch.device("meta"):
            self.model = spec.model_cls(args)
        converters = build_model_converters(config, dims)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            converters.convert(self.model)
        self.said = [str(w.message) for w in caught if "left plain" in str(w.message)]
        self.model = spec.parallelize_fn(self.model, dims, config)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum with a factor
                module.set_force_sum_reduction_for_comms(True)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
        self.loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
        self.optimizers = spec.build_optimizers_fn([self.model], config.optimizer, dims)
        self.schedulers = spec.build_lr_schedulers_fn(self.optimizers, config.lr_scheduler, 10)
        self.optimizers.register_step_post_hook(
            lambda *_: converters.post_optimizer_hook([self.model])
        )
        adapter = spec.state_dict_adapter(args, None) if spec.state_dict_adapter else None
        self.checkpoints = CheckpointManager(
            dataloader=Nothing(), model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedulers, states={}, checkpoint_config=config.checkpoint,
            sd_adapter=adapter, base_folder=str(folder),
        )

    @histc_of_integers()
    @with_permutations_on_cpu
    def train(self, steps, step_all=True):
        from torchtitan.distributed.utils import clip_grad_norm_

        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            tokens = torch.randint(2048, (2, 33), generator=generator)
            loss = self.loss_fn(self.model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            parameters = list(self.model.parameters())
            norm = clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=self.dims.ep_enabled)
            step_is_near.set()
            self.checkpoints.maybe_wait_for_staging()
            step_is_near.clear()
            for optimizer in [self.optimizers] if step_all else self.optimizers:
                optimizer.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            losses.append((loss.item(), float(norm)))
        return losses


def test_the_documented_configuration_quantizes_all_but_the_head(tmp_path):
    on_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec

    file = tmp_path / "llama3.toml"
    file.write_text(documented("torchtitan 0.2"))
    config = ConfigManager().parse_args([f"--job.config_file={file}"])
    spec = get_train_spec(config.model.name)
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args[config.model.flavor])
    build_model_converters(config, SimpleNamespace(tp_enabled=False, pp_enabled=False)).convert(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = [name for name, module in linears.items() if not qshard.is_quantized(module.weight)]
    assert plain == ["output"] and len(linears) > 6


def resume(model, recipe, mode, arguments):
    with shared_folder() as folder, late_stager():
        arguments = [f"--quantize.qshard.recipe={recipe}", f"--checkpoint.async_mode={mode}", *arguments]
        first = Job(folder, *arguments, model=model)
        losses = first.train(range(2))
        first.checkpoints.save(2)
        losses += first.train(range(2, 4))
        first.checkpoints._async_wait()
        dist.barrier()
        second = Job(folder, *arguments, model=model, seed=1)
        assert second.checkpoints.load(2)
        assert second.train(range(2, 4)) == losses[2:]
        assert not different(local_values(first.model), local_values(second.model))
        return losses, first.said


WITHOUT_MASTERS = "--quantize.qshard.no-keep-master", "--quantize.qshard.stochastic-rounding"


@pytest.mark.parametrize(
    "recipe, arguments",
    [(recipe, ()) for recipe in RECIPES]
    + [("mxfp8", WITHOUT_MASTERS), ("nvfp4", (*WITHOUT_MASTERS, "--quantize.qshard.checkpoint-scales"))],
)
@on_ranks(2, devices=("cpu",))
def test_llama3_resumes_bit_for_bit(recipe, arguments):
    losses, said = resume("llama3", recipe, "disabled", arguments)
    assert len(losses) == 4 and not said


@pytest.mark.parametrize(
    "recipe, arguments",
    [("float8_delayed", ()), ("nvfp4", (*WITHOUT_MASTERS, "--quantize.qshard.checkpoint-scales"))],
)
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
@on_ranks(2, devices=("cpu",))
def test_asynchronous_checkpoints_resume(mode, recipe, arguments):
    resume("llama3", recipe, mode, arguments)


@pytest.mark.parametrize("recipe", ["float8_delayed", "float8_blockwise"])
@on_ranks(2, devices=("cpu",))
def test_experts_stay_plain_and_the_rest_resumes_bit_for_bit(recipe):
    _, (said,) = resume("deepseek_v3", recipe, "disabled", ())
    assert "layers.1.moe.experts.w1, layers.1.moe.experts.w2" in said, said


def quantized_names(job):
    return {name for name, parameter in job.model.named_parameters() if qshard.is_quantized(parameter)}


def trains_beside_a_plain_twin(model, steps, parallel, arguments, tolerance):
    with shared_folder() as folder:
        plain = Job(folder, *parallel, model=model, quantized=False).train(range(steps))
        job = Job(folder, *parallel, *arguments, model=model)
        before = quantized_names(job)
        trained = job.train(range(steps))
    assert quantized_names(job) == before
    trained, plain = torch.tensor(trained), torch.tensor(plain)  # a row of loss and norm for each step
    assert not torch.equal(trained, plain)
    torch.testing.assert_close(trained[:2], plain[:2], rtol=tolerance, atol=0)
    torch.testing.assert_close(trained[:, 0], plain[:, 0], rtol=tolerance / 2, atol=0)
    return job, before


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, devices=("cpu",))
def test_llama3_trains_in_codes_beside_a_plain_twin(recipe):
    tolerance = 0.05 if recipe == "nvfp4" else 0.02
    job, names = trains_beside_a_plain_twin("llama3", 10, (), [f"--quantize.qshard.recipe={recipe}"], tolerance)
    plain = {name for name, p in job.model.named_parameters() if p.dim() > 1} - names
    assert plain == {"tok_embeddings.weight"}


EXPERTS = "--quantize.qshard.experts"


@pytest.mark.parametrize(
    "recipe, ep, steps, more",
    [
        ("float8_blockwise", 1, 2, ()),
        ("float8_blockwise", 2, 10, ()),
        ("float8_delayed", 2, 2, ()),
        ("nvfp4", 2, 2, WITHOUT_MASTERS),
        ("mxfp8", 2, 2, ("--quantize.qshard.weight-only",)),
    ],
)
@on_ranks(2, devices=("cpu",))
def test_experts_train_in_codes_beside_a_plain_twin(recipe, ep, steps, more):
    parallel = [f"--parallelism.expert_parallel_degree={ep}"]
    arguments = [f"--quantize.qshard.recipe={recipe}", EXPERTS, *more]
    tolerance = 0.05 if recipe == "nvfp4" else 0.02
    job, names = trains_beside_a_plain_twin("deepseek_v3", steps, parallel, arguments, tolerance)
    stacks = {name: p for name, p in job.model.named_parameters() if ".moe.experts." in name}
    assert stacks and stacks.keys() <= names and all(p.dim() == 3 for p in stacks.values())
    assert not job.said


IN_CODES = "--quantize.qshard.tokens=codes"


@on_ranks(2, devices=("cpu",))
def test_tokens_travel_in_codes_beside_those_that_travel_as_values():
    arguments = "--parallelism.expert_parallel_degree=2", EXPERTS, "--quantize.qshard.recipe=mxfp8"
    modes = ("--activation_checkpoint.mode=none",), ("--activation_checkpoint.selective_ac_option=op",)
    results = []
    with shared_folder() as folder:
        for more in ((), *((IN_CODES, *mode) for mode in modes)):
            job = Job(folder, *arguments, *more, model="deepseek_v3")
            names = quantized_names(job)
            with ExchangedRows() as sent:
                losses = job.train(range(2))
            assert quantized_names(job) == names and len([n for n in names if ".moe.experts." in n]) == 15
            results.append((losses, len(sent.in_codes())))
            assert (qshard.report(job.model).sent().tokens > 0) == bool(more)
    (values, none), (codes, count), selective = results
    assert none == 0 and count == 2 * 2 * 5  # tokens and gradients, of five layers in two steps
    assert selective == (codes, count)
    torch.testing.assert_close(torch.tensor(codes), torch.tensor(values), rtol=5e-3, atol=0)
    assert codes != values


@pytest.mark.parametrize("more", [(), (IN_CODES,)])
@on_ranks(2, devices=("cpu",))
def test_experts_resume_bit_for_bit(more):
    arguments = ("--parallelism.expert_parallel_degree=2", EXPERTS, *more)
    _, said = resume("deepseek_v3", "float8_blockwise", "disabled", arguments)
    assert not said


class Products(TorchDispatchMode):
    """Counts the products of quantized linears in forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


@on_ranks(2, devices=("cpu",))
def test_selective_checkpointing_computes_no_quantized_linear_again():
    results = {}
    for mode in ("none", "selective", "full"):
        arguments = f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.selective_ac_option=op"
        with shared_folder() as folder, Products() as products:
            losses = Job(folder, *arguments).train(range(2))
        results[mode] = losses, products.count
    losses, once = results["none"]
    assert results["selective"] == (losses, once)
    # The head, which runs once in each of two steps, is in no block.
    assert results["full"] == (losses, once + (once - 2))


@pytest.mark.parametrize(
    "model, arguments",
    [("llama3", ()), ("deepseek_v3", ("--parallelism.expert_parallel_degree=2", EXPERTS))],
)
@on_ranks(2, devices=("cpu",), compiles=True)
def test_compiled_blocks_train_as_eager_ones(model, arguments):
    with shared_folder() as folder:
        losses = Job(folder, *arguments, model=model).train(range(2))
        counters = torch._dynamo.utils.counters
        counters.clear()
        compiled = Job(folder, *arguments, "--compile.enable", "--compile.backend=inductor", model=model)
        got = compiled.train(range(2))
        assert counters["frames"]["ok"] > 0
        torch._dynamo.reset()
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-4, atol=0)


@pytest.mark.parametrize("recipe", ["float8_delayed", "nvfp4"])
@on_ranks(2, devices=("cpu",))
def test_hugging_face_output_and_input_have_no_histories(recipe):
    with shared_folder() as folder:
        recipe = f"--quantize.qshard.recipe={recipe}"
        output = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
        first = Job(folder, recipe, *output)
        first.train(range(2))
        first.checkpoints.save(2, last_step=True)
        dist.barrier()
        files = folder.rglob("*.safetensors")  # of each rank, and all in one
        names = {name for file in files for name in load_file(file)}
        assert "model.layers.0.self_attn.q_proj.weight" in names
        assert len(names) == len(list(first.model.parameters()))
        path = f"--checkpoint.initial_load_path={folder}/checkpoint/step-2"
        second = Job(f"{folder}/other", recipe, "--checkpoint.initial_load_in_hf", path, seed=1)
        assert second.checkpoints.load()
        assert not different(local_values(first.model), local_values(second.model))


@on_ranks(2, devices=("cpu",))
def test_a_step_of_the_optimizers_container_is_one_step():
    """The container, an Optimizer itself, steps the optimizers that it holds."""
    with shared_folder() as folder:
        results = []
        for step_all in (True, False):
            job = Job(folder, "--quantize.qshard.recipe=float8_delayed")
            losses = job.train(range(3), step_all)
            results.append((losses, job.checkpoints.states["qshard"].state_dict()))
        (losses, state), (other_losses, other_state) = results
        assert losses == other_losses
        assert all(torch.equal(tensor, other_state[name]) for name, tensor in state.items())


@on_ranks(2, devices=("cpu",))
def test_fused_steps_train_as_the_models_own():
    with shared_folder() as folder:
        jobs = [Job(folder, *options) for options in ((), ("--quantize.qshard.fuse",))]
        plain, fused = (job.train(range(3)) for job in jobs)
    kinds = [Counter(type(m)._qshard_made_of.__name__ for m in job.model.modules() if is_fused(m)) for job in jobs]
    assert not kinds[0] and kinds[1].keys() == {"RMSNorm", "Attention", "FeedForward"}, kinds
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-2, atol=0)


@on_ranks(2, devices=("cpu",))
def test_wrong_options_are_refused():
    on_cpu()
    with shared_folder() as folder:
        parallel = ("--parallelism.data_parallel_shard_degree=1", "--parallelism.tensor_parallel_degree=2")
        with pytest.raises(NotImplementedError, match="tensor parallelism is not supported"):
            Job(folder, *parallel)
        with pytest.raises(SystemExit):  # of torchtitan's own parser
            Job(folder, "--quantize.qshard.recipe=int8")
        for more in ((), (EXPERTS, "--quantize.qshard.weight-only")):
            with pytest.raises(ValueError, match="set experts = true, without weight_only"):
                Job(folder, IN_CODES, *more, model="deepseek_v3")
