"""`--require 'accuracy>=0.99'`: what a run must reach for its command to succeed.

A requirement names a number in the command's summary. One that no summary has is wrong usage, found before
anything is computed; one that is missed is exit code 1, with the results printed all the same.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from linattn_cli.output import CliError, Document, Failure

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|>|<)\s*(\S+)\s*")
_EXAMPLE = "write a quantity, one of >=, >, <=, <, == and a number, in quotes: --require 'accuracy>=0.99'"


@dataclass(frozen=True)
class Requirement:
    """`quantity sign value`, as `accuracy >= 0.99`."""

    quantity: str
    sign: str
    value: float

    def __str__(self) -> str:
        return f"{self.quantity}{self.sign}{self.value:.15g}"

    def holds(self, found: float) -> bool:
        """Whether a measured value meets it; nan meets nothing."""
        return _OPERATORS[self.sign](found, self.value)


def parse(texts: Iterable[str] | None, command: str) -> list[Requirement]:
    """The requirements of a command line. Raises `CliError` (exit 2), naming the nearest quantity.

    >>> [str(found) for found in parse(["accuracy >= .99", "loss<0.1"], "train")]
    ['accuracy>=0.99', 'loss<0.1']
    """
    from linattn_cli.schemas import quantities

    return [_parse(text, quantities(command), command) for text in texts or []]


def _parse(text: str, known: list[str], command: str) -> Requirement:
    found = _FORM.fullmatch(text)
    if found is None:
        raise CliError(f"--require: {text!r} is not a condition", hint=_EXAMPLE)
    quantity, sign, number = found.groups()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CliError(f"--require: {number!r} in {text!r} is not a finite number", hint=_EXAMPLE)
    if not any(fnmatchcase(quantity, pattern) for pattern in known):
        raise _unknown(quantity, known, command)
    return Requirement(quantity, sign, value)


def _unknown(quantity: str, known: Iterable[str], command: str) -> CliError:
    from linattn_cli.recipe import nearest

    names = list(known)
    return CliError(
        f"--require: {command} has no quantity {quantity!r}{nearest(quantity, names)}",
        hint=f"there are {', '.join(names)}",
    )


def check(requirements: Iterable[Requirement], doc: Document) -> None:
    """Hold the summary of a finished document to its requirements: missed ones make it `failed`, exit 1.

    A quantity that may be there but is not (the norm of a matrix the model does not have) is exit 2. The
    results stay in the document either way.
    """
    summary, missed = doc.summary, []
    for requirement in requirements:
        if requirement.quantity not in summary:
            error = _unknown(requirement.quantity, _numbers(summary), f"this {doc.command}")
            doc.set_failure(Failure(error.exit_code, error.kind, error.message, error.hint))
            return
        found = summary[requirement.quantity]
        if found is None or not requirement.holds(found):
            said = "has no value here" if found is None else f"is {_digits(found, requirement.value)}"
            missed.append(f"{requirement} was required, {requirement.quantity} {said}")
    if missed:
        doc.set_failure(Failure(1, "require", "; ".join(missed)), status="failed")


def _numbers(summary: Mapping[str, Any]) -> list[str]:
    return [k for k, v in summary.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]


def _digits(found: float, value: float) -> str:
    """Enough digits that what was found does not read like what was required.

    >>> _digits(0.98999999, 0.99), _digits(3, 4)
    ('0.98999999', '3')
    """
    for digits in range(4, 18):
        text = f"{found:.{digits}g}"
        if float(text) != value or found == value:
            return text
    return repr(found)
