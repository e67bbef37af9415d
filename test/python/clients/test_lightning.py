"""Lightning: Fabric and the Trainer with ModelParallelStrategy (FSDP2) on two ranks, resumed."""

import lightning
import pytest
import torch
import torch.distributed as dist
from client_models import RECIPES, batch, llama
from dist_helpers import on_worlds, shared_folder
from dist_models import different, local_values
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed.fsdp import fully_shard

import qshard


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
    def __init__(self, recipe, seed=0, **kwargs):
        from lightning.fabric.strategies import ModelParallelStrategy

        def parallelize(model, mesh):
            return shard(model, mesh["data_parallel"])

        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
        self.fabric = lightning.Fabric(**common(strategy))
        self.fabric.launch()
        model = qshard.quantize_(llama(seed=seed), RECIPES[recipe], **kwargs)
        self.model = self.fabric.setup(model)
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


def fabric_resumes(recipe, kwargs):
    with shared_folder() as folder:
        first = Fabric(recipe, **kwargs)
        losses = first.train(range(2))
        first.fabric.save(str(folder / "state"), first.state())
        losses += first.train(range(2, 4))
        second = Fabric(recipe, seed=1, **kwargs)
        second.fabric.load(str(folder / "state"), second.state())
        assert second.train(range(2, 4)) == losses[2:]
        assert not different(local_values(first.model), local_values(second.model))


@pytest.mark.parametrize("kwargs", [{}, dict(keep_master=False)], ids=["master", "no-master"])
@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
@on_worlds(2, devices=("cpu",))
def test_fabric_resumes_bit_for_bit(world, recipe, kwargs):
    world.run(fabric_resumes, recipe, kwargs)


# ----------------------------------------------------------------------------------- Trainer


class Module(lightning.LightningModule):
    def __init__(self, recipe, seed):
        super().__init__()
        self.recipe, self.seed, self.model, self.losses = recipe, seed, None, []

    def configure_model(self):
        if self.model is None:
            model = qshard.quantize_(llama(seed=self.seed), RECIPES[self.recipe])
            self.model = shard(model, self.device_mesh["data_parallel"])

    def training_step(self, _, index):
        # Lightning does not wind a loader on that cannot do so itself.
        loss = self.model(**batch(2 * self.global_step + self.global_rank)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_resumes(recipe):
    from lightning.pytorch.strategies import ModelParallelStrategy

    def fit(seed, steps, path=None):
        strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
        trainer = lightning.Trainer(
            **common(strategy), max_steps=steps, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )
        module = Module(recipe, seed)
        trainer.fit(module, torch.utils.data.DataLoader(range(16)), ckpt_path=path)
        return trainer, module

    with shared_folder() as folder:
        path = str(folder / "state")
        first, _ = fit(0, 2)
        first.save_checkpoint(path)
        _, whole = fit(0, 4)
        _, second = fit(1, 4, path)
        assert second.losses == whole.losses[2:]
        assert not different(local_values(whole), local_values(second))


@pytest.mark.parametrize("recipe", ["float8_blockwise", "float8_delayed"])
@on_worlds(2, devices=("cpu",))
def test_a_resumed_trainer_goes_on_as_the_uninterrupted_one(world, recipe):
    world.run(trainer_resumes, recipe)
