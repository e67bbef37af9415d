"""torchtitan 0.3, whose converters change a model's configuration: its debug models, optimizers and
checkpoints, on two ranks, with quantized weights and beside plain twins."""

import pytest
import torch
from dist_helpers import on_ranks, on_worlds, shared_folder
from models.weights import different, local_values
from titan_jobs import (
    TABLE,
    Job,
    assert_close,
    configured,
    exports,
    on_cpu,
    resumes,
    trains_beside_a_plain_twin,
    trains_compiled,
)
from titan_stand_ins import documented
from torch.utils._python_dispatch import TorchDispatchMode

BUDGET_S = 360  # two processes write each asynchronous checkpoint; Inductor compiles models
RECIPES = ["float8_tensorwise", "float8_delayed", "float8_blockwise", "mxfp8", "nvfp4"]


def test_the_documented_configuration_quantizes_all_but_the_head(tmp_path, monkeypatch):
    with on_cpu():
        from torchtitan.config import ConfigManager

        from qshard.integrations.torchtitan.quantized_modules import is_awaited

    (tmp_path / "my_configs.py").write_text(documented("torchtitan 0.3"))
    monkeypatch.syspath_prepend(tmp_path)
    config = ConfigManager().parse_args(["--module=my_configs", "--config=llama3_8b_qshard"])
    with torch.device("meta"):
        model = config.model_spec.model.build()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert [name for name, module in linears.items() if not is_awaited(module)] == ["lm_head"]
    assert len(linears) > 32 and config.model_spec.parallelize_fn.__wrapped__


@pytest.mark.parametrize("recipe", RECIPES)
@on_worlds(2, devices=("cpu",))
def test_llama3_under_fsdp(world, recipe):
    results = world.run(trains_beside_a_plain_twin, "llama3", {"recipe": recipe}, 10, {})
    assert_close(results, 0.05 if recipe == "nvfp4" else 0.01)


HYBRID = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
TENSOR = {"tensor_parallel_degree": 2}
NO_SEQUENCE = {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}
PARTIAL = {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"}


@pytest.mark.parametrize("recipe, steps", [("float8_delayed", 3), ("float8_blockwise", 10)])
@pytest.mark.parametrize("parallelism", [HYBRID, TENSOR, NO_SEQUENCE, PARTIAL])
@on_worlds(2, devices=("cpu",))
def test_llama3_on_other_meshes(world, parallelism, recipe, steps):
    sections = {"parallelism": parallelism}
    assert_close(world.run(trains_beside_a_plain_twin, "llama3", {"recipe": recipe}, steps, sections), 0.01)


PINNED = {"async_mode": "async_with_pinned_mem"}
WITHOUT_MASTERS = {"recipe": "nvfp4", "keep_master": False, "stochastic_rounding": True}


@pytest.mark.parametrize(
    "quantization, sections",
    [
        ({"recipe": "float8_delayed"}, {}),
        ({"recipe": "float8_delayed"}, {"parallelism": TENSOR}),
        ({**WITHOUT_MASTERS, "checkpoint_scales": True}, {}),
        ({"recipe": "float8_delayed"}, {"checkpoint": {"async_mode": "async"}}),
        ({**WITHOUT_MASTERS, "checkpoint_scales": True}, {"checkpoint": {"async_mode": "async"}}),
        ({"recipe": "float8_delayed"}, {"checkpoint": PINNED}),
        ({**WITHOUT_MASTERS, "checkpoint_scales": True}, {"checkpoint": PINNED}),
    ],
)
@on_ranks(2, devices=("cpu",))
def test_llama3_resumes_bit_for_bit(quantization, sections):
    resumes("llama3", quantization, sections)


@pytest.mark.parametrize(
    "quantization, sections",
    [
        ({"recipe": "float8_delayed"}, {"parallelism": TENSOR}),
        ({"recipe": "float8_blockwise"}, {}),
        (WITHOUT_MASTERS, {}),
    ],
)
@on_ranks(2, devices=("cpu",))
def test_llama3_exports_plain_values_to_hugging_face(quantization, sections):
    names = exports("llama3", quantization, sections)
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not {name for name in names if "amax" in name or "rounding" in name}


# Inductor rounds to bf16 where eager does not, and the reverse. Under tensor parallelism a plain twin's loss
# moves by 4e-5 for that; quantized, values near the border of two codes also become the other code.
@pytest.mark.parametrize("parallelism, of_loss", [({}, 1e-4), (TENSOR, 4e-4)])
@on_ranks(2, devices=("cpu",), compiles=True)
def test_compiled_blocks_train_as_eager_ones(parallelism, of_loss):
    trains_compiled("llama3", {"parallelism": parallelism}, of_loss)


class Products(TorchDispatchMode):
    """Counts the products of quantized linears in forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.qshard.linear_forward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["SelectiveAC", "FullAC"])
@on_ranks(2, devices=("cpu",))
def test_selective_checkpointing_computes_no_quantized_linear_again(policy):
    """(losses, products that ran) with a policy and without."""
    with on_cpu():
        import torchtitan.distributed.activation_checkpoint as stock

    results = []
    for policy_config in (None, getattr(stock, policy).Config()):
        with shared_folder() as folder, Products() as products:
            config = configured("llama3", quantization={}, activation_checkpoint=policy_config)
            job = Job(config, folder, dims=results[0][2] if results else None)
            results.append((job.train(range(2)), products.count, job.dims))
            assert job.plain_names() == TABLE
    (losses, once), (again_losses, count) = [result[:2] for result in results]
    assert losses == again_losses
    # Each of two steps has 8 chunks of the head, outside of what is checkpointed.
    blocks = once - 2 * 8
    assert blocks > 0 and count == once + (0 if policy == "SelectiveAC" else blocks)


def refused(sections, match):
    with shared_folder() as folder, pytest.raises(NotImplementedError, match=match):
        Job(configured("llama3", quantization={}, **sections), folder)


@on_worlds(2, devices=("cpu",))
def test_wrong_configurations_are_refused(world):
    with pytest.raises(ValueError, match="recipe must be one of float8_tensorwise, .*, not 'int8'"):
        configured("llama3", quantization={"recipe": "int8"})
    world.run(refused, {"parallelism": {"spmd_backend": "full_dtensor"}}, "full_dtensor")


@on_ranks(2, devices=("cpu",))
def test_a_converter_without_its_parallelize_fn_is_named():
    with shared_folder() as folder:
        config = configured("llama3", quantization={})
        config.model_spec.parallelize_fn = config.model_spec.parallelize_fn.__wrapped__
        job = Job(config, folder)
        with pytest.raises(RuntimeError, match="parallelize_fn = qshard_parallelize"):
            job.train(range(1))


@on_ranks(2, devices=("cpu",))
def test_warnings_name_what_stays_plain():
    config = configured("llama3", quantization={"filter_fqns": []})
    model = config.model_spec.model
    model.enable_weight_tying = True
    w1 = model.layers[0].feed_forward.w1
    stock = type(model.layers[0].feed_forward).__dataclass_fields__["w1"].type  # as config.override may put
    model.layers[0].feed_forward.w1 = stock(
        in_features=w1.in_features, out_features=w1.out_features, param_init=w1.param_init
    )
    with shared_folder() as folder, pytest.warns(UserWarning) as said:
        job = Job(config, folder)
    said = [str(warning.message) for warning in said if "qshard_parallelize" in str(warning.message)]
    names, (tied, left) = job.plain_names(), said
    assert names == TABLE | {"layers.0.feed_forward.w1.weight"}
    assert "lm_head was left plain: it shares its weight with the embedding tok_embeddings" in tied
    assert "layers.0.feed_forward.w1 were left plain: something replaced their configs" in left


@on_ranks(2, devices=("cpu",))
def test_adapters_of_torchtitan_train_beside_a_quantized_base():
    """The base trains, too, plain or not: torchtitan 0.3.0 registers its parts without requires_grad=False."""
    with on_cpu():
        from torchtitan.components.lora import LoRAConverter

    config = configured("llama3", quantization={})
    spec = config.model_spec
    spec.model = LoRAConverter.Config(rank=8).build().convert(spec.model)
    with shared_folder() as folder:
        job = Job(config, folder)
        before = local_values(job.model)
        job.train(range(2))
        changed = different(before, local_values(job.model))
    names, changed = job.plain_names(), changed
    adapters = {name for name in names if "lora_" in name}
    assert adapters and names == TABLE | adapters
    assert {name for name in changed if "lora_b" in name}
