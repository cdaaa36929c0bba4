"""What rows of `linattn verify-scan` say: how near each is to its budget, the worst of a group, what was not run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

COLUMNS = ["model", "form", "against", "dtype", "checks", "quantity", "max_error", "rms_ratio", "budget", "status"]


def share(row: dict[str, Any]) -> float:
    """The larger of the two errors, as a share of its budget; infinite where nothing could be compared.

    >>> share({"max_error": 1.0, "budget": 4.0, "rms_ratio": 3.0, "rms_budget": 6.0})
    0.5
    """
    if row["max_error"] is None:
        return float("inf")
    return max(row["max_error"] / row["budget"], row["rms_ratio"] / row["rms_budget"])


def worst_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each model, form, reference and dtype the row that is nearest to its budget or furthest beyond."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("model", "form", "against", "dtype"))

    order = {found: index for index, found in enumerate(dict.fromkeys(map(key, rows)))}
    for _, group in groupby(sorted(rows, key=lambda row: order[key(row)]), key=key):
        members = list(group)
        worst = max(members, key=lambda row: (not row["passed"], share(row)))
        quantity = f"{worst['quantity']} ({worst['options']})"
        yield {**{name: worst.get(name) for name in COLUMNS}, "checks": len(members), "quantity": quantity}


def by_reason(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What was not run, a row for each reason."""
    forms: dict[str, list[str]] = {}
    models: dict[str, list[str]] = {}
    for row in rows:
        forms.setdefault(row["reason"], []).append(row["form"])
        models.setdefault(row["reason"], []).append(row["model"])
    for reason in forms:
        names = (", ".join(dict.fromkeys(found[reason])) for found in (forms, models))
        yield dict(zip(("not run", "models"), names, strict=True)) | {"reason": reason}


def describe(row: dict[str, Any]) -> str:
    """One line for a row that failed: where, by how much, and both values."""
    where = f"{row['model']} ({row['options']}), {row['form']} against {row['against']}, {row['dtype']}"
    if row["max_error"] is None:
        return f"{where}, {row['quantity']}: {row['reason']}"
    return (
        f"{where}, {row['quantity']}: max error {row['max_error']:.3g} (budget {row['budget']:.3g}), rms ratio "
        f"{row['rms_ratio']:.3g} (budget {row['rms_budget']:.3g}), worst at {row['worst']}: "
        f"got {row['got']:.6g}, expected {row['expected']:.6g}"
    )
