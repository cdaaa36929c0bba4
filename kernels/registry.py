"""One torch-free table of what exists: primitives, mixers, their implementations, dtypes and limits.

The CLI, the tests and the README read it; importing it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_HEAD_DIM = 256
"""Largest key or value dimension of any operator."""


@dataclass(frozen=True)
class Primitive:
    """One of the recurrences every mixer is composed of."""

    name: str
    package: str
    recurrence: str
    impls: tuple[str, ...] = ("reference", "chunk")
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Option:
    """One option of a mixer: its values (or a type), its default and what it does."""

    default: object
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mixer:
    """One attention mixer: where its form and its layer live, and what it accepts.

    `form` and `layer` are `module:name`, imported only when used.
    """

    name: str
    summary: str
    recurrence: str
    source: str
    form: str
    layer: str
    options: dict[str, Option] = field(default_factory=dict)
    impls: tuple[str, ...] = ("reference", "chunk")


PRIMITIVES: dict[str, Primitive] = {
    p.name: p
    for p in (
        Primitive("linear_scan", "linear", "S_t = g_t S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t"),
        Primitive("delta_scan", "delta", "S_t = g_t S_{t-1} + a_t (v_t - S_{t-1}^T p_t)^T;  o_t = S_t^T q_t"),
        Primitive("penalty_gain", "penalty", "A_t = (lambda0 I + sum_{s<=t} u_s u_s^T)^-1;  x_t = A_t k_t"),
    )
}

_FORMS = "linattn_cli.kernels.forms"
_LAYERS = "linattn_cli.layers"
_FEATURE_MAP = Option("elu1", "feature map of queries and keys", ("elu1", "silu", "identity"))

MIXERS: dict[str, Mixer] = {
    m.name: m
    for m in (
        Mixer(
            "softmax",
            "causal softmax attention (torch SDPA), the baseline",
            "o_t = sum_{s<=t} softmax_s(q_t.k_s / sqrt(d)) v_s",
            "Vaswani et al. 2017",
            f"{_FORMS}.softmax:softmax",
            f"{_LAYERS}.softmax:Softmax",
        ),
        Mixer(
            "linear",
            "kernelised linear attention with a ratio read-out",
            "S_t = S_{t-1} + phi(k_t) v_t^T;  o_t = S_t^T phi(q_t) / (phi(q_t).z_t)",
            "Katharopoulos et al. 2020",
            f"{_FORMS}.linear:linear_attention",
            f"{_LAYERS}.linear:Linear",
            {
                "feature_map": _FEATURE_MAP,
                "readout": Option("ratio", "divide by phi(q).z, or not", ("ratio", "raw")),
            },
        ),
        Mixer(
            "deltanet",
            "delta rule with a learned write strength",
            "S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, |k_t| = 1;  o_t = S_t^T q_t",
            "Yang et al. 2024 (arXiv 2406.06484)",
            f"{_FORMS}.deltanet:deltanet",
            f"{_LAYERS}.deltanet:DeltaNet",
        ),
        Mixer(
            "decay_delta",
            "delta rule with a scalar forget gate, the VLA paper's 'DeltaNet' arm",
            "S_t = g_t S_{t-1} + k_t (v_t - S_{t-1}^T k_t)^T, |k_t| = 1",
            "VLA (arXiv 2605.11196), baseline",
            f"{_FORMS}.deltanet:decay_delta",
            f"{_LAYERS}.deltanet:DecayDelta",
        ),
        Mixer(
            "vla",
            "variational linear attention: delta rule written along a penalised gain",
            "A_t = (lambda0 I + sum u u^T)^-1;  a_t = A_t k_t / |A_t k_t|;  "
            "S_t = S_{t-1} + a_t (v_t - S_{t-1}^T k_t)^T",
            "VLA (arXiv 2605.11196)",
            f"{_FORMS}.vla:vla",
            f"{_LAYERS}.vla:VLA",
            {
                "lambda0": Option(0.1, "ridge of the penalty, > 0"),
                "penalty": Option(
                    "learned",
                    "penalty direction u: learned, none (u = 0), or the key itself",
                    ("learned", "none", "key"),
                ),
                "normalise_gate": Option(True, "divide the gain by its norm"),
                "feature_map": _FEATURE_MAP,
                "readout": Option("ratio", "divide by phi(q).z, or not", ("ratio", "raw")),
                "beta": Option(
                    "none", "scale the write direction by a learned sigmoid gate", ("none", "sigmoid")
                ),
            },
        ),
    )
}
