"""One decoding step of a mixer in one launch: when it applies, and what each mixer's step is made of.

A call of one token with a carried state, resolved to Triton and in need of no gradient, is a decoding step. The
forms ask `decodes` and hand over; everything else goes through the primitives. The kernels, and the algebra
the rules below choose from, are in `kernels/decode_triton.py` and `kernels/decode_hla_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_cli.kernels import dispatch
from linattn_cli.kernels.forms.features import FEATURE_MAPS, RATIO_EPS, check_choice
from linattn_cli.kernels.penalty.inverse import REFRESH
from linattn_cli.kernels.types import Impl, PenaltyState, state_tensors


class Rule(NamedTuple):
    """How a mixer's step differs from the others of its kind.

    unit_query, unit_key  features over their norm
    delta                 write the prediction error, not the value
    gain                  where A' acts: on the `write`, on the `read`, or `none`
    decayed_read          the prediction is that of the decayed state
    """

    unit_query: bool = True
    unit_key: bool = True
    delta: bool = True
    gain: str = "none"
    decayed_read: bool = False


RULES = {
    "linear": Rule(unit_query=False, unit_key=False, delta=False),
    "deltanet": Rule(),
    "decay_delta": Rule(),
    "gated_deltanet": Rule(decayed_read=True),
    "vla": Rule(unit_query=False, gain="write"),
    "rls": Rule(gain="write"),
    "mesa": Rule(delta=False, gain="read"),
}


class MatrixStep(NamedTuple):
    """What a step returns: o `[B, 1, Q, V]`, the states after it, and which read-outs `[B, Q]` were clamped."""

    o: Tensor
    S: Tensor
    penalty: PenaltyState | None
    z: Tensor | None
    clamped: Tensor | None


def decodes(
    impl: str | Impl, operators: Iterable[str], inputs: Iterable[Tensor | None], mask: Tensor | None, state: object
) -> bool:
    """Whether a call is a decoding step that one launch can make; `operators` are those it stands for.

    A padding mask goes the general way, and so does an operator whose implementation was replaced.
    """
    tensors = [x for x in inputs if x is not None]
    first = tensors[0]
    if state is None or mask is not None or first.dim() != 4 or first.shape[1] != 1 or first.dtype == torch.float64:
        return False
    if Impl.parse(impl) not in (Impl.AUTO, Impl.TRITON):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *state_tensors(state))):
        return False
    return all(
        dispatch.resolve(operator, impl, first) == "triton" and not dispatch.overridden(operator, "triton")
        for operator in operators
    )


def matrix_step(
    mixer: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    *,
    feature_map: str,
    u: Tensor | None = None,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    penalty: PenaltyState | None = None,
    lambda0: float = 1.0,
    normalise: bool = False,
    z: Tensor | None = None,
) -> MatrixStep:
    """A step of one of `RULES`; q, k, v and u before their feature map, `[B, 1, H, D]`.

    A given z asks for the ratio read-out. Without a penalty the gain of `vla` is the key over lambda0. The inverse
    is taken anew from the mass where it has been updated 64 times, as in every implementation.
    """
    from linattn_cli.kernels.decode_triton import matrix_step, matrix_step_operator
    from linattn_cli.kernels.penalty.triton import penalty_inverse

    check_choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    rule, age = RULES[mixer], 0
    gain, mass, inverse = "none", None, None
    if penalty is not None:
        gain = rule.gain
        mass, inverse, age = penalty
        if age >= REFRESH:
            inverse, age = penalty_inverse(mass, float(lambda0)), 0
    step = matrix_step_operator if torch.compiler.is_compiling() else matrix_step
    o, clamped, S, mass, inverse, sums = step(
        q, k, v, u, beta, log_decay, S, mass, inverse, z, feature_map, rule.unit_query, rule.unit_key, rule.delta,
        gain, normalise, rule.decayed_read, 1.0 if gain != "none" or normalise else 1.0 / lambda0, RATIO_EPS,
    )  # fmt: skip
    return MatrixStep(
        o,
        S,
        None if penalty is None else PenaltyState(mass, inverse, age + 1),
        None if z is None else sums,
        None if z is None else clamped,
    )


def hla_step(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: dict[str, Tensor | None],
    *,
    feature_map: str,
    log_decay: Tensor | None = None,
    powers: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    ridge: float = 0.0,
    eps: float,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
    """A step of a higher-order form of `decode_hla_triton.py`: o, which read-outs were clamped, and its states.

    `states` are named as in `STATES` there, and a given h asks for the ratio; `powers` are those of the decay in S, P,
    H, G and the leak into G.
    """
    from linattn_cli.kernels.decode_hla_triton import STATES, hla_step, hla_step_operator

    check_choice("feature_map", feature_map, tuple(FEATURE_MAPS))
    step: Any = hla_step_operator if torch.compiler.is_compiling() else hla_step
    given = [states.get(name) for name in STATES]
    used = list(powers) if log_decay is not None else [0] * len(powers)
    o, clamped, *after = step(q, k, v, log_decay, *given, form, feature_map, used, float(ridge), float(eps))
    kept = {name: None if x is None else new for name, x, new in zip(STATES, given, after, strict=True)}
    return o, clamped if states.get("h") is not None else None, kept
