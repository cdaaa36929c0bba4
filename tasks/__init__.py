"""Synthetic tasks: data from (task config, seed) alone; no model, no global random state."""
