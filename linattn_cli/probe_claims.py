"""What the papers claim about stability, beside what was measured: one verdict and its number per claim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linattn_cli.probe_blowup import D_HEAD, LAMBDA0, PUBLISHED_LOG10, STEPS, BlowUp
from linattn_cli.probe_measure import Measurement
from linattn_cli.probe_products import power
from linattn_cli.probe_states import growth_exponent

BOUNDED, UNBOUNDED = 0.1, 0.4
"""Growth exponents over the last decade up to which a state counts as settled, and from which on as unbounded: sums
of independent terms have 0.5. In between it is not decided."""

SETTLING = 10
"""Tokens for each dimension of a head that a state is given to settle: it fills up with d_head associations first."""

FORMULA = 1e-5
"""How far the closed form may be from a measured norm, and a norm or radius from the 1 that is claimed of it."""

VANISHED, EXPLODED = 0.1, 10.0
"""Norms of products of Jacobians that a gradient must stay between."""

BLOWN_UP = 1000.0
"""Growth of the norm of S since the first token that counts as an explosion; sums of 1000 values reach 30 to 1000."""

PAPER_LENGTH, PAPER_LINEAR, PAPER_VLA = 1000, 1600.0, 15.0
"""The paper's norms of S after 1000 tokens: linear attention about 1600, VLA below 15."""


@dataclass(frozen=True)
class Claim:
    """One claim: whether it holds here (None: not decided), the number that decides, and a sentence."""

    key: str
    claim: str
    holds: bool | None
    value: float | None
    text: str

    @property
    def verdict(self) -> str:
        word = {True: "holds", False: "does not hold", None: "not decided"}[self.holds]
        return f"{word}: {self.text}"


def claims(measurements: Sequence[Measurement], blow_up: BlowUp | None = None) -> list[Claim]:
    """Verdicts on every claim that these measurements can decide; none for models that are not among them."""
    vla = [m for m in measurements if _is_vla(m) and m.jacobians is not None]
    linear = [m for m in measurements if m.subject.mixer == "linear" and m.state is not None]
    found: list[Claim] = []
    if vla and blow_up is None:
        found += _bounded(vla)
        if all(m.jacobians is not None and m.jacobians.cosine is not None for m in vla):
            found += _unit_vectors(vla)
        found += _gradients(vla)
    found += _unbounded(linear)
    if blow_up is None:
        found += _paper_norms(vla, linear)
    else:
        found += _without_normalising(vla, blow_up)
    return found


def _is_vla(m: Measurement) -> bool:
    """The paper's VLA: without a penalty it is its own control, a delta rule, and a write strength is not in it."""
    options = m.subject.options
    return m.subject.mixer == "vla" and options.get("penalty") != "none" and options.get("beta") == "none"


def _last(group: Sequence[Measurement], name: str = "S") -> list[float]:
    return [float(m.state.mean(name)[-1]) for m in group if m.state is not None]


def _exponents(group: Sequence[Measurement], name: str = "S") -> list[float]:
    found = [growth_exponent(m.state.mean(name)) for m in group if m.state is not None]
    return [x for x in found if x is not None]


def _length(group: Sequence[Measurement]) -> int:
    return group[0].subject.recurrence.length


def between(values: Sequence[float], digits: int = 4) -> str:
    """`1.02` or `1.02 to 1.05`, to so many significant digits.

    >>> between([1.5, 2.5]), between([3.0])
    ('1.5 to 2.5', '3')
    """
    low, high = (f"{x:.{digits}g}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _bounded(vla: Sequence[Measurement]) -> Iterator[Claim]:
    exponents, last, total = _exponents(vla), _last(vla), _length(vla)
    what = "VLA Prop. 1: the norm of S stays bounded"
    broken = next((m.state.nonfinite for m in vla if m.state is not None and m.state.nonfinite), None)
    if broken:
        yield Claim("vla_prop1", what, False, None, f"{broken[1]} is not finite from step {broken[0]} on")
        return
    if len(exponents) < len(vla):
        return
    largest = max(exponents)
    text = f"norm {between(last)} at T = {total}, growing like T^{largest:.2f} over the last decade"
    early = total < SETTLING * max(m.subject.recurrence.tokens["k"].shape[-1] for m in vla)
    holds = True if largest <= BOUNDED else None if early or largest < UNBOUNDED else False
    text += "; too short to tell, give a longer --seq-len" if holds is None else ""
    yield Claim("vla_prop1", what, holds, largest, text)


def _unit_vectors(vla: Sequence[Measurement]) -> Iterator[Claim]:
    """Proposition 2 and the norm that is true in its place; for unit vectors only."""
    jacobians = [m.jacobians for m in vla if m.jacobians is not None]
    norms = [float(j.norms.max()) for j in jacobians]
    means = [float(j.norms.mean()) for j in jacobians]
    off = max(float((j.norms - 1).abs().max()) for j in jacobians)
    yield Claim(
        "vla_prop2_norm",
        "VLA Prop. 2: the spectral norm of J_t is 1",
        off <= FORMULA,
        max(norms),
        f"up to {max(norms):.6g}, on average {between(means, 5)}",
    )
    radius = max(float((j.radii - 1).abs().max()) for j in jacobians)
    yield Claim(
        "vla_prop2_radius",
        "VLA Prop. 2, read as the spectral radius: it is 1",
        radius <= FORMULA,
        radius,
        f"1 up to {radius:.1e}",
    )
    errors = [j.closed_error for j in jacobians if j.closed_error is not None]
    cosines = [float(j.cosine.min()) for j in jacobians if j.cosine is not None]
    yield Claim(
        "vla_closed_form",
        "the norm of J_t is (1 + sqrt(5 - 4 a.k)) / 2",
        max(errors) <= FORMULA,
        max(errors),
        f"off by {max(errors):.1e} at most, a.k down to {min(cosines):.4g}",
    )


def _gradients(vla: Sequence[Measurement]) -> Iterator[Claim]:
    products, total = [m.jacobians.products for m in vla if m.jacobians is not None], _length(vla)
    largest = max(max(p.largest.values()) for p in products)
    whole = [p.largest[total] for p in products]
    yield Claim(
        "vla_no_explosion",
        "VLA: gradients do not explode",
        largest <= math.log10(EXPLODED),
        power(largest),
        f"products of Jacobians have norm {_power_text(largest)} at most, over any number of steps",
    )
    least = min(p.smallest_whole for p in products)
    yield Claim(
        "vla_no_vanishing",
        "VLA: gradients do not vanish",
        least >= math.log10(VANISHED),
        power(least),
        f"the product of all {total} Jacobians has norm {_power_text(least)} to {_power_text(max(whole))}",
    )


def _unbounded(linear: Sequence[Measurement]) -> Iterator[Claim]:
    exponents = _exponents(linear)
    if not exponents:
        return
    least, total = min(exponents), _length(linear)
    text = f"norm {between(_last(linear))} at T = {total}, growing like T^{between(exponents, 2)}"
    if max(exponents) < 0.75:
        text += " (T^1 needs values that do not average out)"
    what = "linear attention: the norm of S grows without bound, O(T)"
    holds = True if least >= UNBOUNDED else None if least > BOUNDED else False
    yield Claim("linear_unbounded", what, holds, least, text)


def _paper_norms(vla: Sequence[Measurement], linear: Sequence[Measurement]) -> Iterator[Claim]:
    if not vla or not linear or _length(vla) != PAPER_LENGTH or _length(linear) != PAPER_LENGTH:
        return
    small, large = _last(vla), _last(linear)
    yield Claim(
        "vla_paper_norms",
        "VLA at T = 1000: norm of S about 1600 for linear attention, below 15 for VLA, 109 times less",
        max(small) < PAPER_VLA and min(large) / max(small) >= PAPER_LINEAR / PAPER_VLA,
        min(large) / max(small),
        f"here {between(large)} and {between(small)}, {min(large) / max(small):.3g} times less",
    )


def _without_normalising(vla: Sequence[Measurement], found: BlowUp) -> Iterator[Claim]:
    """The paper's own example, and what these mixers do, whose keys at least are unit vectors."""
    repeated, random = float(found.repeated[-1]), float(found.random[-1])
    yield Claim(
        "vla_unnormalised_gate",
        f"VLA without normalised gates: 1e32 after {STEPS} steps at d_head {D_HEAD}",
        abs(repeated - PUBLISHED_LOG10) < 1,
        repeated,
        f"10^{repeated:.2f} for one raw key repeated (lambda0 {LAMBDA0:g}, u = 0; the paper's figure is 10^"
        f"{PUBLISHED_LOG10:.2f}), but 10^{random:.2f} for random keys",
    )
    products = [m.jacobians.products for m in vla if m.jacobians is not None]
    largest = max(max(p.largest.values()) for p in products)
    yield Claim(
        "vla_unnormalised_gradients",
        "VLA without normalised gates: gradients explode",
        largest > math.log10(EXPLODED),
        largest,
        f"on unit keys products of Jacobians reach norm {_power_text(largest)}",
    )
    states = [m.state for m in vla if m.state is not None]
    broken = next((state.nonfinite for state in states if state.nonfinite), None)
    reached = max(float((x := state.mean("S"))[x.isfinite()].max()) for state in states)
    growth = max(float((x := state.mean("S"))[x.isfinite()].max() / x[0]) for state in states)
    text = f"norm up to {reached:.3g}, {growth:.3g} times that after the first token"
    yield Claim(
        "vla_unnormalised_state",
        "VLA without normalised gates: the norm of S explodes",
        broken is not None or growth > BLOWN_UP,
        growth,
        f"{text}, then {broken[1]} is not finite from step {broken[0]} on" if broken else text,
    )


def _power_text(log10: float) -> str:
    """
    >>> _power_text(0.0), _power_text(-2.5), _power_text(31.5)
    ('1', '0.00316', '10^31.5')
    """
    return f"10^{log10:.1f}" if log10 > 6 or log10 < -6 else f"{10**log10:.3g}"
