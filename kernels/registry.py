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
    impls: tuple[str, ...] = ("reference", "chunk", "triton")
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
    impls: tuple[str, ...] = ("reference", "scan", "chunk", "triton")


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
_SIGNED_FEATURE_MAP = Option("silu", _FEATURE_MAP.help, _FEATURE_MAP.choices)
_SIGNED_QK = Option("identity", _FEATURE_MAP.help, _FEATURE_MAP.choices)
_RAW_READOUT = Option("raw", "divide by the same sums with v = 1 (clamped by sign), or not", ("raw", "ratio"))
_RIDGE = Option(1.0, "ridge of the regression, > 0")

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
            impls=("reference", "chunk"),
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
                "beta": Option("none", "scale the write direction by a learned sigmoid gate", ("none", "sigmoid")),
            },
        ),
        Mixer(
            "gated_deltanet",
            "delta rule with a learned write strength and a forget gate",
            "S_t = g_t S_{t-1} + beta_t k_t (v_t - g_t S_{t-1}^T k_t)^T, |k_t| = 1;  o_t = S_t^T q_t",
            "Yang et al. 2024 (arXiv 2412.06464)",
            f"{_FORMS}.gated_deltanet:gated_deltanet",
            f"{_LAYERS}.gated_deltanet:GatedDeltaNet",
        ),
        Mixer(
            "rls",
            "recursive least squares: VLA with u = k and a gain that is not normalised",
            "A_t = (lambda0 I + sum k k^T)^-1;  S_t = S_{t-1} + A_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = S_t^T q_t",
            "recursive least squares",
            f"{_FORMS}.mesa:rls",
            f"{_LAYERS}.mesa:RLS",
            {"lambda0": _RIDGE, "feature_map": _SIGNED_FEATURE_MAP},
        ),
        Mixer(
            "mesa",
            "the mesa layer, online ridge regression solved exactly",
            "A_t = (lambda0 I + sum k k^T)^-1;  S_t = S_{t-1} + k_t v_t^T;  o_t = S_t^T A_t q_t",
            "von Oswald et al. 2023 (arXiv 2309.05858)",
            f"{_FORMS}.mesa:mesa",
            f"{_LAYERS}.mesa:Mesa",
            {"lambda0": _RIDGE, "feature_map": _SIGNED_FEATURE_MAP},
        ),
        Mixer(
            "hla2",
            "second-order linear attention",
            "S_t = a S_{t-1} + k_t k_t^T;  H_t = b H_{t-1} + (S_t q_t) v_t^T;  o_t = H_t^T q_t",
            "HLA (arXiv 2510.27258), sections 3 and 4",
            f"{_FORMS}.hla2:hla2",
            f"{_LAYERS}.hla:HLA2",
            {
                "masked": Option(True, "count a key only for values at or after it"),
                "readout": _RAW_READOUT,
                "ridge": Option(0.0, "ridge added to S, >= 0"),
                "decay": Option(
                    "none",
                    "forget gate: moment (g, g^2), cascade (g, g), mask (g^2, g), or the paper's leaking update",
                    ("none", "moment", "cascade", "mask", "published"),
                ),
                "state_form": Option(
                    "summary", "carried state: (S, H), or the paper's (S, C, G)", ("summary", "paper")
                ),
                "feature_map": _SIGNED_QK,
            },
        ),
        Mixer(
            "ahla",
            "asymmetric second-order linear attention",
            "P_t = g P_{t-1} + k_t v_t^T;  E_t = g E_{t-1} + k_t (P_t^T q_t)^T;  o_t = E_t^T q_t",
            "HLA (arXiv 2510.27258), section 6",
            f"{_FORMS}.ahla:ahla",
            f"{_LAYERS}.hla:AHLA",
            {
                "readout": _RAW_READOUT,
                "decay": Option("none", "forget gate g on both stages", ("none", "cascade")),
                "feature_map": _SIGNED_QK,
            },
        ),
        Mixer(
            "hla3",
            "third-order linear attention",
            "SK_t = a SK_{t-1} + k_t k_t^T;  P_t = p P_{t-1} + k_t v_t^T;  H_t = h H_{t-1} + (SK_t q_t)(P_t^T q_t)^T;  "
            "o_t = H_t^T q_t",
            "HLA (arXiv 2510.27258), section 7",
            f"{_FORMS}.hla3:hla3",
            f"{_LAYERS}.hla:HLA3",
            {
                "variant": Option(
                    "causal", "the causal order, or the set the paper's form sums", ("causal", "published")
                ),
                "readout": _RAW_READOUT,
                "decay": Option(
                    "none",
                    "forget gate: moment a = p = g, h = g^3; cascade all g; mask a = g^2, p = h = g; "
                    "published has none and moment",
                    ("none", "moment", "cascade", "mask"),
                ),
                "feature_map": _SIGNED_QK,
            },
        ),
    )
}
