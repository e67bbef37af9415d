"""What a module is given in place of norm(x), where it reads that by linears alone."""

from torch import Tensor


class Projections:
    """What linears make of norm(x), by the linears' names, and norm(x)'s shape, dtype and device, which are
    x's. norm(x) itself may never have been stored. It is no tensor: other uses of it are errors."""

    def __init__(self, x: Tensor, outputs: dict[str, Tensor]):
        self.x, self.outputs = x, outputs

    @property
    def shape(self):
        return self.x.shape

    @property
    def dtype(self):
        return self.x.dtype

    @property
    def device(self):
        return self.x.device

    @property
    def ndim(self):
        return self.x.ndim

    def dim(self):
        return self.x.dim()

    def size(self, dim=None):
        return self.x.size() if dim is None else self.x.size(dim)
