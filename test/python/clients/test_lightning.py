"""Lightning: Fabric and the Trainer with ModelParallelStrategy (FSDP2) on two ranks, resumed."""

import lightning
import pytest
import torch
import torch.distributed as dist
from client_models import RECIPES, assert_near, batch, compiling, llama
from dist_helpers import on_ranks, shared_folder
from lightning.fabric.plugins.environments import LightningEnvironment
from models.weights import different, local_values
from torch.distributed.fsdp import fully_shard

import qshard

BUDGET_S = 60


class Launched(LightningEnvironment):
    """The ranks of a test's world, which is there already."""

    creates_processes_externally = True

    def global_rank(self):
        return dist.get_rank()

    def local_rank(self):
        return dist.get_rank()

    def node_rank(self):
        return 0

    def world_size(self):
        return dist.get_world_size()

    def set_global_rank(self, rank):
        pass

    def set_world_size(self, size):
        pass


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def common(strategy):
    return dict(accelerator="cpu", devices=2, strategy=strategy, plugins=[Launched()])


# ------------------------------------------------------------------------------------ Fabric


class Fabric:
    def __init__(self, recipe, seed=0, compiled=False, save_distributed_checkpoint=True, **kwargs):
        from lightning.fabric.strategies import ModelParallelStrategy

        def parallelize(model, mesh):
            return shard(model, mesh["data_parallel"])

        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo",
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        self.fabric = lightning.Fabric(**common(strategy))
        self.fabric.launch()
        model = qshard.quantize_(llama(seed=seed), RECIPES[recipe], **kwargs)
        self.model = self.fabric.setup(torch.compile(model, backend="inductor") if compiled else model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def train(self, steps):
        losses = []
        for number in steps:
            loss = self.model(**batch(2 * number + dist.get_rank())).loss
            self.fabric.backward(loss)
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append((loss.item(), float(norm)))
        return losses

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("kwargs", [{}, dict(keep_master=False)], ids=["master", "no-master"])
@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
@on_ranks(2, devices=("cpu",))
def test_fabric_resumes_bit_for_bit(recipe, kwargs):
    with shared_folder() as folder:
        first = Fabric(recipe, **kwargs)
        losses = first.train(range(2))
        first.fabric.save(str(folder / "state"), first.state())
        losses += first.train(range(2, 4))
        second = Fabric(recipe, seed=1, **kwargs)
        second.fabric.load(str(folder / "state"), second.state())
        assert second.train(range(2, 4)) == losses[2:]
        assert not different(local_values(first.model), local_values(second.model))


def assert_reads(file, model, prefix=""):
    dist.barrier()
    plain = llama(seed=1)
    saved = torch.load(file)
    saved = {n.removeprefix(prefix): t for n, t in saved.get("state_dict", saved.get("model")).items()}
    plain.load_state_dict(saved)
    whole = {name.removeprefix(prefix): p.full_tensor() for name, p in model.named_parameters()}
    for name, value in plain.named_parameters():
        assert torch.equal(value, whole[name]), name


@on_ranks(2, devices=("cpu",), compiles=True)
def test_fabric_exports_and_compiles():
    """A file that plain models read, of save_distributed_checkpoint=False; torch.compile before setup."""
    with shared_folder() as folder:
        fabric = Fabric("float8_blockwise", save_distributed_checkpoint=False)
        losses = fabric.train(range(2))
        fabric.fabric.save(str(folder / "state"), fabric.state())
        assert_reads(folder / "state", fabric.model.module)
    with compiling():
        compiled = Fabric("float8_blockwise", compiled=True)
        assert_near(compiled.train(range(2)), losses)


# ----------------------------------------------------------------------------------- Trainer


class Module(lightning.LightningModule):
    def __init__(self, recipe, seed, compiled):
        super().__init__()
        self.recipe, self.seed, self.model, self.losses = recipe, seed, None, []
        self.compiled = compiled

    def configure_model(self):
        if self.model is None:
            model = qshard.quantize_(llama(seed=self.seed), RECIPES[self.recipe])
            self.model = shard(model, self.device_mesh["data_parallel"])
            if self.compiled:
                self.model.compile(backend="inductor")

    def training_step(self, _, index):
        # Lightning does not wind a loader on that cannot do so itself.
        loss = self.model(**batch(2 * self.global_step + self.global_rank)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(recipe, seed, steps, path=None, compiled=False, distributed=True, **kwargs):
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        2, 1, process_group_backend="gloo", save_distributed_checkpoint=distributed
    )
    trainer = lightning.Trainer(
        **common(strategy), max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, **kwargs,
    )
    module = Module(recipe, seed, compiled)
    trainer.fit(module, torch.utils.data.DataLoader(range(16)), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
@on_ranks(2, devices=("cpu",))
def test_a_resumed_trainer_goes_on_as_the_uninterrupted_one(recipe):
    with shared_folder() as folder:
        path = str(folder / "state")
        first, _ = fit(recipe, 0, 2)
        first.save_checkpoint(path)
        _, whole = fit(recipe, 0, 4)
        _, second = fit(recipe, 1, 4, path)
        assert second.losses == whole.losses[2:]
        assert not different(local_values(whole), local_values(second))


@on_ranks(2, devices=("cpu",), compiles=True)
def test_the_trainer_clips_exports_and_compiles():
    with shared_folder() as folder:
        trainer, module = fit("float8_blockwise", 0, 2, distributed=False, gradient_clip_val=0.5)
        trainer.save_checkpoint(str(folder / "state"))
        assert_reads(folder / "state", module, "model.")
    _, unclipped = fit("float8_blockwise", 0, 2)
    assert unclipped.losses[0] == module.losses[0]
    assert different(local_values(unclipped), local_values(module))
    with compiling():
        _, compiled = fit("float8_blockwise", 0, 2, compiled=True, gradient_clip_val=0.5)
        assert_near(compiled.losses, module.losses)
