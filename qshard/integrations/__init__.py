"""What other packages are given to know quantized models by. Each module needs its package installed."""
