"""The rows of `probe-norm`, flat for pandas and jq, and its tables for people."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linattn_cli.output import Document
from linattn_cli.probe_measure import Jacobians, Measurement
from linattn_cli.probe_products import power
from linattn_cli.probe_states import growth_exponent

Row = dict[str, Any]

SERIES_POINTS = 128
"""Steps of a series in the JSON document, spread evenly over the logarithm of time."""


def row(m: Measurement, *, series: bool = False) -> Row:
    """One row of scalars a subject; with `series` also what was found over time.

    Norms are the largest over sequences and heads, those of states their mean; lengths count steps.
    """
    subject = m.subject
    k = subject.recurrence.tokens["k"]
    found: Row = {
        "model": subject.model,
        "source": subject.source,
        "layer": subject.layer,
        "seed": subject.seed,
        "seq_len": subject.recurrence.length,
        "heads": k.shape[2],
        "d_head": k.shape[3],
        "jacobian": m.reason if m.jacobians is None else ", ".join(m.jacobians.names),
    }
    if m.jacobians is not None:
        found |= _of_jacobians(m.jacobians)
    if m.penalty_norms is not None:
        found["joint_jacobian_norm_max"] = float(m.penalty_norms.max())
    if m.condition is not None:
        found["condition_A_max"] = float(m.condition.max())
        found["condition_A_last"] = float(m.condition[-1].max())
    if m.state is not None:
        for name, norms in m.state.over_time.items():
            found[f"state_norm_{name}"] = float(m.state.mean(name)[-1])
            found[f"state_norm_max_{name}"] = _largest_finite(norms)
            found[f"growth_exponent_{name}"] = growth_exponent(m.state.mean(name))
        found["nonfinite_step"], found["nonfinite_tensor"] = m.state.nonfinite or (None, None)
    if m.jacobians is not None:
        products = m.jacobians.products
        found |= {f"product_norm_{n}": power(log) for n, log in products.largest.items()}
        found["product_norm_log10"] = products.largest[subject.recurrence.length]
    if m.flow is not None:
        found |= {f"gradient_norm_{n}": norm for n, norm in m.flow.norms.items()}
        found["gradient_error"] = m.flow.error
    if series:
        found["series"] = _series(m)
    return found


def _largest_finite(x: Tensor) -> float:
    """The largest finite number, nan where there is none."""
    finite = x[x.isfinite()]
    return float(finite.max()) if finite.numel() else math.nan


def _of_jacobians(j: Jacobians) -> Row:
    at = int(j.norms.amax(1).nan_to_num(-1.0).argmax())
    return {
        "jacobian_steps": len(j.steps),
        "jacobian_norm_max": float(j.norms.max()),
        "jacobian_norm_max_step": j.steps[at],
        "jacobian_norm_mean": float(j.norms.mean()),
        "spectral_radius_max": float(j.radii.max()),
        "spectral_radius_min": float(j.radii.min()),
        "cosine_min": None if j.cosine is None else float(j.cosine.min()),
        "cosine_mean": None if j.cosine is None else float(j.cosine.mean()),
        "closed_form_error": j.closed_error,
        "jacobian_error": j.error,
        "jacobian_residual": j.residual,
    }


def _series(m: Measurement) -> Row:
    found: Row = {}
    if m.state is not None:
        steps = log_spaced(m.subject.recurrence.length, SERIES_POINTS)
        at = [step - 1 for step in steps]
        found["steps"] = steps
        found["state_norm"] = {name: m.state.mean(name)[at].tolist() for name in m.state.over_time}
        if m.condition is not None:
            found["condition_A"] = m.condition[at].amax(1).tolist()
    if m.jacobians is not None:
        j = m.jacobians
        at = [i - 1 for i in log_spaced(len(j.steps), SERIES_POINTS)]
        found["jacobian_steps"] = [j.steps[i] for i in at]
        found["jacobian_norm"] = j.norms[at].amax(1).tolist()
        found["spectral_radius"] = j.radii[at].amax(1).tolist()
        if j.cosine is not None:
            found["cosine"] = j.cosine[[step - 1 for step in found["jacobian_steps"]]].amin(1).tolist()
        found["product_steps"] = list(j.products.largest)
        found["product_norm_log10"] = list(j.products.largest.values())
        found["product_norm_median_log10"] = list(j.products.median.values())
    if m.penalty_norms is not None:
        found["joint_jacobian_steps"] = m.penalty_steps
        found["joint_jacobian_norm"] = m.penalty_norms.amax(1).tolist()
    if m.flow is not None:
        found["gradient_steps"], found["gradient_norm"] = list(m.flow.norms), list(m.flow.norms.values())
    return found


def log_spaced(total: int, most: int) -> list[int]:
    """At most `most` whole numbers from 1 to `total`, evenly spread in the logarithm.

    >>> log_spaced(1000, 4)
    [1, 10, 100, 1000]
    """
    if total <= most:
        return list(range(1, total + 1))
    points = torch.logspace(0, math.log10(total), most, dtype=torch.float64).round().long()
    return points.clamp(1, total).unique().tolist()


MAIN = {
    "jacobian": "jacobian",
    "jacobian_norm_max": "norm_max",
    "jacobian_norm_mean": "norm_mean",
    "spectral_radius_max": "radius_max",
    "cosine_min": "cosine_min",
    "closed_form_error": "closed_form_error",
    "joint_jacobian_norm_max": "norm_max_with_A",
    "condition_A_max": "condition_A_max",
    "gradient_error": "gradient_error",
}
"""Columns of the first table: the row's key, and the shorter name that a table has room for."""


def condensed(found: Row) -> Row:
    """The main columns of a row, with its norms of states as one cell each."""
    states = [name.removeprefix("state_norm_max_") for name in found if name.startswith("state_norm_max_")]
    total = found["seq_len"]
    return {
        **_who(found),
        **{short: found.get(name) for name, short in MAIN.items()},
        "product_norm": found.get(f"product_norm_{total}"),
        "gradient_norm": found.get(f"gradient_norm_{total}"),
        "state_norm": {name: found[f"state_norm_{name}"] for name in states} or None,
        "growth": {name: found[f"growth_exponent_{name}"] for name in states} or None,
    }


def _who(found: Row) -> Row:
    return {name: found[name] for name in ("model", "source", "layer", "seed")}


def tables(command: str, rows: list[Row], summary: Row) -> str:
    """Jacobians, products and gradients by length, states, then the verdicts."""
    from linattn_cli.render import render

    who = ["model", *(n for n in ("source", "layer", "seed") if len({found[n] for found in rows}) > 1)]

    def table(title: str, some: list[Row], columns: list[str]) -> str:
        shown = [{name: found.get(name) for name in (*who, *columns)} for found in some]
        used = [name for name in (*who, *columns) if any(line[name] is not None for line in shown)]
        return f"{title}\n\n{render(Document(command, results=shown, columns=used))}" if some else ""

    with_jacobian = [found for found in rows if "jacobian_norm_max" in found]
    parts = [table("Jacobian of a step", [_who(r) | condensed(r) for r in rows], list(MAIN.values()))]
    for prefix, title in (
        ("product_norm_", "Norm of the product of n Jacobians, largest"),
        ("gradient_norm_", "Norm of d(output at T)/d(state n tokens before its end), largest"),
    ):
        lengths = sorted({int(n) for r in with_jacobian for key in r if (n := key.removeprefix(prefix)).isdigit()})
        some = [_who(r) | {str(n): r.get(f"{prefix}{n}") for n in lengths} for r in with_jacobian]
        parts.append(table(title, some, [str(n) for n in lengths]))
    states = [line for found in rows for line in _states(found)]
    columns = ["tensor", "norm_at_T", "norm_max", "growth_exponent", "first_nonfinite"]
    parts.append(
        table("Frobenius norm of the state: mean over heads at T, largest of any head and time", states, columns)
    )
    if summary:
        parts.append(render(Document(command, summary=summary)))
    return "\n".join(part for part in parts if part)


def _states(found: Row) -> list[Row]:
    names = [name.removeprefix("state_norm_max_") for name in found if name.startswith("state_norm_max_")]
    bad = found.get("nonfinite_step")
    return [
        _who(found)
        | {
            "tensor": name,
            "norm_at_T": found[f"state_norm_{name}"],
            "norm_max": found[f"state_norm_max_{name}"],
            "growth_exponent": found[f"growth_exponent_{name}"],
            "first_nonfinite": f"{found['nonfinite_tensor']} at step {bad}" if bad is not None else None,
        }
        for name in names
    ]
