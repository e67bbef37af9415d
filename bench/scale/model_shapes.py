"""Models as the scale model sees them: weights of a layer, widths, experts."""

from dataclasses import dataclass

from local_bytes import Weight

SEQUENCE = 4096  # tokens of a sequence, as in the recorded runs


@dataclass(frozen=True)
class Shape:
    """A decoder. `weights` are the linears of a layer but for its experts; embedding and head stay plain."""

    name: str
    layers: int
    dim: int
    width: int  # columns that a layer's activations have beside dim: of the MLP, or of a token's experts
    attention: int  # heads x channels of a product of queries and keys
    vocab: int
    weights: tuple[Weight, ...]
    experts: tuple[Weight, ...] = ()  # stacks of a layer
    chosen: int = 0  # experts of a token

    @property
    def dense(self) -> int:
        """Elements of a layer's linears."""
        return sum(weight.numel for weight in self.weights)

    @property
    def of_experts(self) -> int:
        return sum(stack.numel for stack in self.experts)

    @property
    def used_by_a_token(self) -> int:
        """Elements of a layer that multiply one token."""
        return self.dense + sum(stack.numel // stack.matrices * self.chosen for stack in self.experts)

    @property
    def root(self) -> int:
        """Elements of the embedding and the head."""
        return 2 * self.vocab * self.dim

    @property
    def numel(self) -> int:
        return self.layers * (self.dense + self.of_experts) + self.root


def llama(name: str, layers: int, dim: int, hidden: int, vocab: int = 128256, kv: int = 1024) -> Shape:
    attention = (Weight(dim, dim), Weight(kv, dim), Weight(kv, dim), Weight(dim, dim))
    mlp = (Weight(hidden, dim), Weight(hidden, dim), Weight(dim, hidden))
    return Shape(name, layers, dim, hidden, dim, vocab, attention + mlp)


def deepseek_shaped() -> Shape:
    """61 layers alike of DeepSeek-V3's widths: latent attention, one shared expert, 8 of 256 experts for a token. The
    first three layers of the original are dense, which is left out."""
    dim, width, heads = 7168, 2048, 128
    attention = (
        Weight(1536, dim), Weight(heads * 192, 1536), Weight(576, dim), Weight(heads * 256, 512), Weight(dim, heads * 128),
    )  # fmt: skip
    shared = (Weight(width, dim), Weight(width, dim), Weight(dim, width))
    stacks = (Weight(width, dim, 256), Weight(width, dim, 256), Weight(dim, width, 256))
    return Shape("DeepSeek-shaped MoE", 61, dim, 9 * width, heads * 160, 129280, attention + shared, stacks, 8)


SLICE = llama("slice of Llama 8B", 8, 4096, 14336, vocab=32000)
LLAMA_8B = llama("Llama 8B", 32, 4096, 14336)
LLAMA_70B = llama("Llama 70B", 80, 8192, 28672)
LLAMA_405B = llama("Llama 405B", 126, 16384, 53248)
MOE = deepseek_shaped()
SHAPES = (LLAMA_8B, LLAMA_70B, LLAMA_405B, MOE)
