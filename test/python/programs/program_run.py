"""Runs one random program (random_programs.py) on this rank, and compares after each step."""

import hashlib
import inspect
import re
import traceback
from collections import Counter
from dataclasses import dataclass

import program_alias_steps  # noqa: F401: registers steps
import program_checkpoint_steps  # noqa: F401: the same
import program_collectives  # noqa: F401: the same
import program_cuda_steps  # noqa: F401: the same
import program_model_steps  # noqa: F401: the same
import program_tensor_steps  # noqa: F401: the same
import program_whole_steps  # noqa: F401: the same
import torch
import torch.distributed as dist
from dist_helpers import device, gather_objects
from helpers import is_quantized, ops
from models.weights import local
from program_isolation import before_step
from program_meshes import own_part, part_count
from program_models import TwinLinear, link, make_pair
from program_steps import KINDS
from program_values import (
    check_gathered,
    difference,
    has_pending,
    implausible,
    local_rows,
    plain_value,
    quantized_like,
    rounded_like,
    shares_no_scales,
    whole,
)
from torch.distributed.checkpoint.api import CheckpointException

from qshard._runtime.classes import TensorState

# Documented refusals: what they say, of which steps, and whether of anything or of shares of parameters
# and their views alone. A refused step must leave everything as it was.
REFUSALS = (
    # A linear's weight is codes as they lie in memory.
    (r"the weight must be a 2-D window of whole rows", r"read_codes", "anything"),
    # A shard was written, and its codes are read before the flush that all ranks take part in.
    (r"rows on other ranks\. Call qshard\.flush\(model\)", r"read_codes", "share"),
    (r"no reduction group is known for it yet", r"read_codes", "share"),
    # Delayed scaling keeps the amaxes of offloaded weights where the forwards are: a linear of
    # the shard itself is none, and torch loads no full state_dict into tensors on two devices.
    (r"the amax history of a weight on cpu is on cuda", r"read_codes", "share"),
    (r"Multiple devices found", r"load", "anything"),
)


WRITTEN = 6  # among the integers that say what a packed tensor is (LayoutField in ops/tensor/saved_tensor.h)


@dataclass(frozen=True)
class Difference:
    """What is wrong, on which ranks, after which step (-1: after the model was made)."""

    step: int
    text: str


class Run:
    """One program on this rank."""

    def __init__(self, program, folder, gloo_group, begin=lambda text: None, delays=True):
        self.program, self.delays = program, delays
        self.ours, self.twin = self.subjects = make_pair(
            program.setup, program.seed % 1000, program.ranks
        )
        self.ours.twin = self.twin
        self.twin.catch_up = self.catch_up
        for subject in self.subjects:
            subject.folder, subject.gloo_group = folder, gloo_group
        self.wrong = []
        self.begin = begin
        self.endings = Counter()  # of steps

    def difference(self):
        """Runs it all; returns the first Difference, the same on all ranks, or None."""
        at = -1
        self.after_step()
        for at, step in enumerate(self.program.steps):
            self.begin(f"{at} {step}")
            before_step([s.model for s in self.subjects], self.program.seed, at, self.delays)
            self.endings[step.name, self.execute(step)] += 1
            found = self.after_step()
            if found:
                return Difference(at, found)
        self.begin("end")
        for subject in self.subjects:
            for module in subject.fsdp_modules():
                module.reshard()
        wrong = check_gathered(self.ours, self.twin)
        if wrong:
            self.wrong.append(wrong)
        found = self.after_step() or self.after_step()
        return Difference(len(self.program.steps), found) if found else None

    def digest(self):
        """The digest of the values that the quantized subject ends with, and of how its steps ended."""
        tensors = {**self.ours.registers, **{n: local(p) for n, p in self.ours.params.items()}}
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            try:
                digest.update(digest_of(plain_value(tensor.detach())))
            except RuntimeError as error:  # a register that a step left unreadable
                digest.update(str(error).encode())
        digest.update(repr(sorted(self.endings.items())).encode())
        return digest.hexdigest()

    def names_exist(self, step):
        """Whether what a step works on was made, and not dropped with the step that makes it."""
        args = step.args
        names = [args.get(name) for name in ("target", "to", "source")] + list(args.get("targets", ()))
        return all(n in self.ours.registers for n in names if n and n[0] == "r")

    # ------------------------------------------------------------------------- one step

    def execute(self, step):
        """Returns how it ended: done, raised (in both), refused, different, or skipped. Whichever it is
        on this rank, it takes part in what all ranks do."""
        if not self.names_exist(step):
            if KINDS[step.name].reads:
                self.twin.catch_up()
            return "skipped"
        stages = [Stages(step, subject) for subject in self.subjects]
        while True:
            ours = stages[0].advance()
            if ours.error and self.is_refusal(step, ours.error):
                if KINDS[step.name].reads:
                    self.twin.catch_up()
                return "refused"
            twin = stages[1].advance()
            if (ours.error is None) != (twin.error is None) or ours.done != twin.done:
                self.wrong.append(f"ours {ours.ending()}, the twin {twin.ending()}")
                return "different"
            if ours.error:
                return "raised"
            text = output_difference(ours.value, twin.value)
            if text:
                self.wrong.append(f"results: {text}")
            if ours.done:
                return "done"
            self.catch_up()

    def is_refusal(self, step, error):
        home = self.ours.home(step.args.get("target", ""))
        is_share = home[:1] == "w" or home in self.ours.shares
        of = ("share", "anything") if is_share else ("anything",)
        return any(
            kind in of and re.fullmatch(names, step.name) and re.search(text, str(error))
            for text, names, kind in REFUSALS
        )

    # ------------------------------------------------------------------------ after a step

    def after_step(self):
        """What is different on any rank."""
        if self.catch_up():
            if self.program.ranks == 1:
                return "; ".join(self.wrong)
            texts = gather_objects("; ".join(self.wrong))
            return "\n".join(f"  rank {i}: {text}" for i, text in enumerate(texts) if text)
        self.compare_parameters()
        self.compare_registers()
        if self.program.ranks == 1 and self.wrong:
            return "; ".join(self.wrong)
        return None

    def catch_up(self):
        """Brings the twin up to date with flushes and gathers of ours."""
        for subject in self.subjects:
            subject.refresh()
        if not self.program.setup.sharded:
            link(self.ours, self.twin)
        for layer in self.twin.model.layers:
            if isinstance(layer, TwinLinear):
                layer.note_state()
        is_wrong = self.settle_parameters()
        for name in self.ours.registers:
            if name in self.twin.registers:  # else ours was made by the step under way
                self.settle_register(name)
        # After a forward that failed, FSDP2's unshard() gathers on a stream that waits for no write: of a
        # plain twin it would gather older values.
        if device().type == "cuda":
            torch.cuda.synchronize()
        return is_wrong

    def settle_parameters(self):
        """Without a master a flush rounds values, of which the twin does not know. Whether there was
        one is seen; what it must have left is not, or by stochastic rounding not exactly. Returns
        whether anything is wrong on any rank."""
        pairs = [
            (layer, f"layers.{i}.weight")
            for i, layer in enumerate(self.program.setup.layers)
            if layer.format
        ]
        rows = [self.state_of_weight(layer, name) for layer, name in pairs]
        state = torch.tensor([[bool(self.wrong)] * len(rows[0]), *rows], dtype=torch.int32)
        if self.program.ranks > 1:
            agreed = state.to(device())
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            # Without sharding each rank flushes for itself.
            state[0] = agreed[0].cpu()
            if self.program.setup.sharded:
                state = agreed.cpu()
                self.compare_ranks(state[1:], [name for _, name in pairs])
                state[0] |= bool(self.wrong)
        for (layer, name), (pending, differs, *_) in zip(pairs, state[1:].tolist()):
            if differs and not pending:
                self.take_over(layer, name)
        return bool(state[0, 0])

    def state_of_weight(self, layer, name):
        """[pending, different from the twin's value] without a master, [is written, is not] and numbers
        that the largest of all ranks tell apart where replicas have other values."""
        ours, twin = local(self.ours.params[name]), local(self.twin.params[name])
        if not is_quantized(ours):
            return [0] * (4 + 2 * part_count())
        value = plain_value(ours)
        settles = not layer.keep_master
        pending = settles and has_pending(ours)
        differs = settles and difference(value, twin.detach()) is not None
        is_written = TensorState(ours.detach()).pack()[2][WRITTEN]
        of_replicas = [-(2**31)] * (2 * part_count())
        number = int.from_bytes(digest_of(value)[:3], "big")
        of_replicas[2 * own_part() : 2 * own_part() + 2] = number, -number
        return [pending, differs, is_written, not is_written, *of_replicas]

    def compare_ranks(self, state, names):
        """`state`: the largest of all ranks, and so the same on all of them."""
        for name, (_, _, some_have_written, some_have_not, *of_replicas) in zip(names, state.tolist()):
            if some_have_written and some_have_not:
                self.wrong.append(f"{name} is written on some ranks only")
            if any(a + b for a, b in zip(of_replicas[::2], of_replicas[1::2])):
                self.wrong.append(f"{name} has other values on its replicas")

    def take_over(self, layer, name):
        """What a flush has rounded."""
        ours, twin = self.ours.params[name], self.twin.params[name]
        whole_twin = whole(twin)
        if layer.stochastic:
            values, own = local(twin).detach(), plain_value(local(ours))
            tolerance = values.abs() + whole_twin.abs().max().to(values.device) / 6
            if ((own - values).abs() > tolerance).any():
                self.wrong.append("stochastic rounding is far off")
        else:
            quantized = quantized_like(whole_twin, local(ours))
            self.twin.model.layers[int(name.split(".")[1])].note_rounded(quantized)
            own = local_rows(ops.dequantize(quantized, dtype=whole_twin.dtype), twin)
        with torch.no_grad():
            local(twin).detach().copy_(own)

    def compare_parameters(self):
        for name, twin in self.twin.params.items():
            ours = local(self.ours.params[name])
            layer = self.program.setup.layers[int(name.split(".")[1])]
            if name.endswith("weight") and is_quantized(ours) != bool(layer.format):
                self.wrong.append(f"{name} is quantized: {is_quantized(ours)}")
                continue
            text = difference(plain_value(ours), local(twin).detach().contiguous())
            if text:
                self.wrong.append(f"{name}: {text}")

    def compare_registers(self):
        for name in list(self.ours.registers)[:-8]:  # later steps name the last ones only
            for subject in self.subjects:
                del subject.registers[name]
        for name, ours in self.ours.registers.items():
            twin = self.twin.registers[name]
            try:
                text = difference(plain_value(ours), twin.detach().contiguous())
            except RuntimeError as error:
                text = f"cannot be read: {error}"
            if not text and ours.numel() > 0:
                strides = [(a, b) for a, b, n in zip(ours.stride(), twin.stride(), twin.shape) if n > 1]
                if any(a != b for a, b in strides):
                    text = f"has strides {ours.stride()}, expected {twin.stride()}"
            if text:
                self.wrong.append(f"{name}: {text}")

    def settle_register(self, name):
        """A register without a master that a flush has rounded. Where it holds all rows that share
        scales, what the flush left is known exactly."""
        ours, twin = self.ours.registers[name], self.twin.registers[name]
        if not is_quantized(ours) or TensorState(ours).keeps_master() or has_pending(ours):
            return
        try:
            value = plain_value(ours)
        except RuntimeError:
            return  # compare_registers says so
        if (value.shape, value.dtype) != (twin.shape, twin.dtype) or not difference(value, twin):
            return
        if shares_no_scales(ours):
            text = difference(value, rounded_like(twin, ours))
        else:
            text = implausible(value, twin)
        if text:
            self.wrong.append(f"{name}, rounded: {text}")
        with torch.no_grad(), torch.inference_mode(twin.is_inference()):
            twin.copy_(value)


def digest_of(value):
    return hashlib.sha256(value.cpu().double().numpy().tobytes()).digest()


class Stages:
    """A step under way on one subject."""

    @dataclass
    class Result:
        value: object = None
        error: Exception | None = None
        done: bool = False

        def ending(self):
            if self.error is None:
                return "goes on" if not self.done else "is done"
            where = traceback.extract_tb(self.error.__traceback__)[-1]
            text = (str(self.error).splitlines() or [""])[0]
            return f"raises {type(self.error).__name__}: {text[:300]} ({where.name})"

    def __init__(self, step, subject):
        self.step, self.subject, self.stages = step, subject, None

    def advance(self):
        try:
            if self.stages is None:
                value = self.step.run(self.subject)
                if not inspect.isgenerator(value):
                    return self.Result(value, done=True)
                self.stages = value
            return self.Result(next(self.stages))
        except StopIteration:
            return self.Result(done=True)
        except (Exception, CheckpointException) as error:  # noqa: BLE001: the twin must raise, too
            return self.Result(error=error, done=True)


def output_difference(ours, twin):
    """Yields from what a step returned: tensors, dicts of them, what compares itself, and texts that say what is
    wrong."""
    if hasattr(ours, "compare"):
        return ours.compare(twin)
    if isinstance(ours, str):
        return ours
    if isinstance(ours, dict):
        if ours.keys() != twin.keys():
            return f"{sorted(ours)}, expected {sorted(twin)}"
        texts = {name: output_difference(ours[name], twin[name]) for name in ours}
        return "; ".join(f"{name}: {text}" for name, text in texts.items() if text) or None
    if isinstance(ours, torch.Tensor):
        return difference(plain_value(ours), plain_value(twin))
    return None if ours == twin or ours != ours else f"{ours}, expected {twin}"
