"""How much to draft, and when not to: measured costs and calibrated acceptance."""
