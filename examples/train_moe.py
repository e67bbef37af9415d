"""Trains a small Llama whose MLPs are experts, with expert parallelism and FSDP2. Run by torchrun:

    torchrun --nproc-per-node 2 examples/train_moe.py --format float8_blockwise --ep 2
    torchrun --nproc-per-node 4 examples/train_moe.py --format bf16 float8_blockwise --ep 2

Each token goes to two of eight experts. Ranks of an expert mesh have as many experts each, and
`qshard.TokenDispatcher` sends tokens to them: as codes that their experts multiply, or, with --tokens values, as bf16.
The loop, the text and the measurements are those of train_llama.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_llama
from llama import Llama, LlamaConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from train_llama import PLAIN, RECIPES, process_group, run

import qshard


def parse_arguments(arguments=None):
    parser = train_llama.make_parser(__doc__.splitlines()[0])
    parser.add_argument("--ep", type=int, default=1, metavar="RANKS", help="that share the experts of a layer")
    parser.add_argument("--experts", type=int, default=8, help="of a layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    parser.add_argument("--tokens", choices=["codes", "values"], default="codes", help="how tokens travel")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that balances experts")
    args = parser.parse_args(arguments)
    if args.tp > 1 or args.head_format:
        parser.error("--tp and --head-format are options of train_llama.py")
    if args.ep < 1 or args.experts % args.ep:
        parser.error(f"--ep {args.ep} does not divide --experts {args.experts}")
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k {args.top_k} is not between 1 and --experts {args.experts}")
    return args


class MoE(nn.Module):
    """Experts in the place of FeedForward. `balance` is the loss of the last forward that is least where all experts
    get as many tokens (Switch Transformers, arXiv:2101.03961, equation 4)."""

    def __init__(self, config: LlamaConfig, experts: int, top_k: int, sends_codes: bool):
        super().__init__()
        self.top_k, self.sends_codes = top_k, sends_codes
        self.router = nn.Linear(config.dim, experts, bias=False)
        self.experts = qshard.nn.GroupedExperts(config.dim, config.hidden, experts)
        self.experts.init_weights(0.02 / (2 * config.layers) ** 0.5)
        nn.init.normal_(self.router.weight, std=0.02)
        self.balance = None

    def distribute(self, mesh):
        """Each rank of an expert mesh keeps its own experts."""
        for name, stack in list(self.experts.named_parameters()):
            self.experts.register_parameter(name, nn.Parameter(distribute_tensor(stack.detach(), mesh, [Shard(0)])))
        self.dispatcher = qshard.TokenDispatcher(self.router.out_features, mesh)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        shares = self.router(tokens).float().softmax(-1)
        scores, ids = shares.topk(self.top_k)
        chosen = F.one_hot(ids, shares.shape[-1]).sum(1).float()
        self.balance = shares.shape[-1] / self.top_k * (shares.mean(0) * chosen.mean(0)).sum()
        format = self.experts.message_format if self.sends_codes else None
        rows, counts, routes = self.dispatcher.dispatch(tokens, ids, format)
        y = self.dispatcher.combine(self.experts(rows, counts), routes, scores.to(x.dtype))
        return y.view(x.shape)


class Trainer(train_llama.Trainer):
    """Trains on two meshes of the same ranks: "dp" has all of them, and ("efsdp", "ep") those that share the rows of
    an expert's matrices, and those that share experts."""

    def __init__(self, format, args, mesh, expert_mesh):
        self.expert_mesh = expert_mesh
        super().__init__(format, args, mesh)

    def build(self):
        args = self.args
        torch.manual_seed(args.seed)  # the same on every rank, whatever their number
        config = LlamaConfig(dim=args.dim, hidden=args.hidden, layers=args.layers, heads=args.heads,
                             max_seq_len=args.seq_len)
        model = Llama(config)
        for layer in model.layers:
            layer.ffn = MoE(config, args.experts, args.top_k, args.tokens == "codes")
        model.to(self.device)
        qshard.fuse_(model)
        for layer in model.layers:
            layer.ffn.distribute(self.expert_mesh["ep"])
        if self.format != PLAIN:
            qshard.quantize_(model, RECIPES[self.format], tp_mesh=self.expert_mesh["ep"],
                             filter_fn=lambda module, name: name != "head" and not name.endswith("router"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            experts = fully_shard(layer.ffn.experts, mesh=self.expert_mesh["efsdp"], mp_policy=policy)
            # Tokens of all ranks meet in a gradient of experts, and few ranks share it.
            experts.set_gradient_divide_factor(self.world_size)
            experts.set_force_sum_reduction_for_comms(self.device == "cpu")  # gloo cannot multiply first
            fully_shard(layer, mesh=self.mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=self.mesh["dp"], mp_policy=policy)
        return model

    def parameter_groups(self):
        """One for each mesh: an operator on several DTensors takes one mesh."""
        experts = [parameter for layer in self.model.layers for parameter in layer.ffn.experts.parameters()]
        known = set(map(id, experts))
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        return [{"params": others}, {"params": experts}]

    def loss(self, inputs, targets):
        loss = super().loss(inputs, targets)
        if not self.model.training:
            return loss
        return loss + self.args.balance * sum(layer.ffn.balance for layer in self.model.layers)

    def validate(self):
        self.model.eval()
        loss = super().validate()
        self.model.train()
        return loss


def main():
    args = parse_arguments()
    with process_group() as device:
        ranks = dist.get_world_size()
        if ranks % args.ep:
            raise ValueError(f"--ep {args.ep} does not divide the {ranks} processes")
        mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
        experts = init_device_mesh(device, (ranks // args.ep, args.ep), mesh_dim_names=("efsdp", "ep"))
        for format in args.formats:
            run(Trainer(format, args, mesh, experts), args)


if __name__ == "__main__":
    main()
