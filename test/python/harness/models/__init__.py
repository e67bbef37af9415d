"""The models that tests quantize, shard and train, and ways to look at them."""
