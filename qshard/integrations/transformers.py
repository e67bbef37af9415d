"""For transformers: its experts_implementation "qshard", which an import of this module registers, and callbacks for
the Trainer, and trainers made of it, as TRL's."""

import os

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from qshard.checkpoint.quantization_state import QuantizationState
from qshard.experts import transformers as experts
from qshard.model.choosing import is_adapter
from qshard.model.quantize import is_quantized, quantize_
from qshard.module_state import dynamics_of
from transformers import TrainerCallback

STATE_NAME = "quantization_state.pt"
experts.register()


class QuantizationStateCallback(TrainerCallback):
    """Saves the QuantizationState of a model quantized with `persistent_state=False` in the Trainer's
    checkpoints, as quantization_state.pt, and loads it when training resumes. What `save_model` and
    `save_pretrained` write has then the names of a plain model alone.

    resume_from_checkpoint: the folder given to `Trainer.train`; by default the one of
        TrainingArguments, or checkpoint-<step> in its output_dir. Raises FileNotFoundError, on all
        ranks, if the state is not in it.
    """

    def __init__(self, resume_from_checkpoint: str | None = None):
        self.resume_from_checkpoint = resume_from_checkpoint

    def on_save(self, args, state, control, model=None, **kwargs):
        if args.should_save:
            values = QuantizationState(model).state_dict()
            torch.save(values, os.path.join(_folder(args, state), STATE_NAME))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            return
        given = self.resume_from_checkpoint or args.resume_from_checkpoint
        file = os.path.join(given if isinstance(given, str) else _folder(args, state), STATE_NAME)
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"QuantizationStateCallback: {file} does not exist; give it the folder that "
                "Trainer.train resumes from, QuantizationStateCallback(resume_from_checkpoint=...)"
            )
        values = torch.load(file, map_location="cpu", weights_only=True)
        QuantizationState(model).load_state_dict(values)


class QuantizeCallback(QuantizationStateCallback):
    """Quantizes the Trainer's model where the Trainer has a place for it: when training begins, after
    accelerate has cast parameters, mapped the optimizer's by their addresses and sharded them by FSDP2;
    under DistributedDataParallel, which holds the parameters by then, when the Trainer is made. Then it is
    a QuantizationStateCallback.

    recipe, options: as `qshard.quantize_` takes them. Without filter_fn LoRA's adapters stay plain.
    persistent_state is False: histories and counts are in quantization_state.pt, and not in the model's files.
    resume_from_checkpoint: as of QuantizationStateCallback.

    Raises ValueError for a model that was quantized before; RuntimeError under DistributedDataParallel if
    it was added after the Trainer was made; NotImplementedError for other wrappers than these.
    """

    def __init__(self, recipe, *, resume_from_checkpoint: str | None = None, **options):
        super().__init__(resume_from_checkpoint)
        if "persistent_state" in options:
            raise TypeError(
                "QuantizeCallback: persistent_state is False, because the Trainer makes its checkpoints' names "
                "of a plain model; leave it out"
            )
        if options.get("weights", "quantized") == "quantized":  # else the histories are the modules'
            options["persistent_state"] = False
        self.recipe, self.options = recipe, options
        self.has_quantized = False

    def on_init_end(self, args, state, control, model=None, **kwargs):
        kind = AcceleratorState().distributed_type
        if kind not in (DistributedType.NO, DistributedType.FSDP) and not _is_ddp(kind):
            raise NotImplementedError(
                f"QuantizeCallback: the Trainer runs {kind.value}; it may run one process, "
                "DistributedDataParallel or FSDP2"
            )
        if _is_ddp(kind):
            self._quantize(model)
        else:
            self._refuse_quantized(model)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if _is_ddp(AcceleratorState().distributed_type) and not self.has_quantized:
            raise RuntimeError(
                "QuantizeCallback: DistributedDataParallel holds the parameters by now; give the callback "
                "to the Trainer when it is made, Trainer(..., callbacks=[QuantizeCallback(recipe)])"
            )
        self._quantize(model)
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def _quantize(self, model):
        if self._refuse_quantized(model):
            return
        options = dict(self.options)
        if "filter_fn" not in options and any(is_adapter(name) for name, _ in model.named_modules()):
            options["filter_fn"] = lambda module, name: not is_adapter(name)
        quantize_(model, self.recipe, **options)
        self.has_quantized = True

    def _refuse_quantized(self, model):
        """Whether this callback has quantized the model."""
        is_there = any(is_quantized(p) for p in model.parameters()) or any(dynamics_of(model))
        if is_there and not self.has_quantized:
            raise ValueError(
                "QuantizeCallback: the model was quantized before the Trainer was made; leave out one of "
                "the two, qshard.quantize_ or the callback"
            )
        return is_there


def _is_ddp(kind):
    return kind.value.startswith("MULTI_")


def _folder(args, state):
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
