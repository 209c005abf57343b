"""How much to draft, and when not to: measured costs, calibrated acceptance, and the theory behind both."""
