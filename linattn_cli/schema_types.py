"""How the fields of the published schemas are written down.

A field is `"name": "type, meaning"`. The types are number, integer, string, boolean, null, strings, integers,
numbers, objects (arrays), object and any, joined by `|`; a `?` after them marks a field that need not be there,
a `*` in a name stands for any words. A number that is not finite is null with a flag beside it (`loss_is_nan:
true`), so every number may be null.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Fields = dict[str, str]

RECIPE = "recipe"
"""In place of the fields of `config`: the resolved recipe, whose schema pydantic knows."""


@dataclass(frozen=True)
class Output:
    """What one command prints.

    about    one sentence
    rows     the kinds of rows in `results`; none where it is always empty
    summary  what `summary` has once the command has succeeded
    config   what `config` has once the command line was understood
    """

    about: str
    rows: tuple[Fields, ...] = ()
    summary: Fields = field(default_factory=dict)
    config: Fields | str = field(default_factory=dict)
