"""The networks of learned drafters, in torch."""
