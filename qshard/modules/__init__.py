"""What the package needs of torch.nn.Module and torch.func."""
