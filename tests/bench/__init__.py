"""Measured figures, as ratios of things timed side by side in one run. Not tests: nothing here can fail."""
