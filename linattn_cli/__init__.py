"""linattn trains, measures, times and proves linear-attention mixers."""

__version__ = "0.1.0"
