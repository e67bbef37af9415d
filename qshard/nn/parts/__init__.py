"""What the modules of qshard.nn are made of."""
