"""Attention layers, one nn.Module per mixer: projections plus one call of a form.

Each is a drop-in causal attention layer `[B, T, D] -> [B, T, D]`; `Mixer` is their base, and that of your own.
"""

from linattn_cli.layers.base import Mixer, MixerState
from linattn_cli.layers.deltanet import DecayDelta, DeltaNet
from linattn_cli.layers.gated_deltanet import GatedDeltaNet
from linattn_cli.layers.hla import AHLA, HLA2, HLA3
from linattn_cli.layers.linear import Linear
from linattn_cli.layers.mesa import RLS, Mesa
from linattn_cli.layers.softmax import Softmax
from linattn_cli.layers.vla import VLA

__all__ = [
    "AHLA",
    "HLA2",
    "HLA3",
    "RLS",
    "VLA",
    "DecayDelta",
    "DeltaNet",
    "GatedDeltaNet",
    "Linear",
    "Mesa",
    "Mixer",
    "MixerState",
    "Softmax",
]
