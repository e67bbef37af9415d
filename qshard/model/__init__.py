"""What quantize_ and its opposite do to a model."""
