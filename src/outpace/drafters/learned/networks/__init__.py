"""Networks of learned drafters in torch that serve as they are trained; names are those of checkpoints."""
