"""For the Trainer of transformers."""

import os

import torch
from qshard.quantization_state import QuantizationState
from transformers import TrainerCallback

STATE_NAME = "quantization_state.pt"


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


def _folder(args, state):
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
