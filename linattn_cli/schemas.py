"""The published JSON Schemas (draft 2020-12), one a command, built from the tables in `schema_fields`.

They are strict: a key that is not in the tables is an error, so that the tables cannot fall behind. Nothing
heavy is imported; the schema of a recipe, which `config` of some commands is, comes from pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from linattn_cli.output import SCHEMA_VERSION
from linattn_cli.schema_fields import ENV, ERROR, ERROR_TYPES, METRICS, OUTPUTS
from linattn_cli.schema_types import RECIPE, Fields, Output

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
STATUSES = ("ok", "failed", "error", "interrupted", "terminated")
PARTS = ("config", "results", "summary", "env", "error")

_ARRAYS = {"strings": "string", "integers": "integer", "numbers": "number", "objects": "object"}
_FLAG = r"_is_(nan|inf|negative_inf)$"


def split(text: str) -> tuple[tuple[str, ...], bool, str]:
    """Types, whether it is always there, and meaning of a field as the tables write it.

    >>> split("number|null?, seconds, on the wall")
    (('number', 'null'), False, 'seconds, on the wall')
    """
    types, _, meaning = text.partition(", ")
    return tuple(types.rstrip("?").split("|")), not types.endswith("?"), meaning


def field_schema(text: str) -> Schema:
    """The schema of one field.

    >>> field_schema("integers, tokens")
    {'type': 'array', 'items': {'type': 'integer'}, 'description': 'tokens'}
    """
    types, _, meaning = split(text)
    if types == ("any",):
        return {"description": meaning}
    kinds: list[Schema] = []
    plain: list[str] = []
    for kind in types:
        if kind in _ARRAYS:
            kinds.append({"type": "array", "items": _typed([_ARRAYS[kind]])})
        else:
            plain.append(kind)
    if plain:
        kinds.append(_typed(plain))
    schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {**schema, "description": meaning} if meaning else schema


def _typed(kinds: list[str]) -> Schema:
    # A number that is not finite is null, with a flag beside it.
    names = list(dict.fromkeys([*kinds, *(["null"] if "number" in kinds else [])]))
    return {"type": names[0] if len(names) == 1 else names}


def object_schema(fields: Fields, *, required: bool = True) -> Schema:
    """An object of these fields and no others; `required` is whether those without `?` must be there."""
    schema: Schema = {"type": "object", "additionalProperties": False}
    if required:
        always = [name for name, text in fields.items() if split(text)[1] and "*" not in name]
        schema["required"] = always
    schema["properties"] = {name: field_schema(text) for name, text in fields.items() if "*" not in name}
    patterns = {_pattern(name): field_schema(text) for name, text in fields.items() if "*" in name}
    flags = {"const": True, "description": "the value beside it is null because it is nan or infinite"}
    schema["patternProperties"] = {**patterns, _FLAG: flags}
    return schema


def _pattern(name: str) -> str:
    return "^" + ".+".join(map(re.escape, name.split("*"))) + "$"


def schema_of(command: str) -> Schema:
    """The schema of the JSON document that `command` prints, failures included.

    >>> schema_of("list")["properties"]["command"]
    {'const': 'list'}
    """
    if command == "metrics":
        return {
            "$schema": DIALECT,
            "title": "a line of metrics.jsonl",
            "description": "What training logs, one JSON object a line.",
            **object_schema(METRICS),
        }
    made = OUTPUTS[command]
    parts: Schema = {
        "schema_version": {"const": SCHEMA_VERSION},
        "command": {"const": command},
        "status": {
            "enum": list(STATUSES),
            "description": "ok: exit 0; failed: a check failed or a --require was missed, exit 1; else see error",
        },
        "env": {**object_schema(ENV), "description": "where it ran"},
        "config": _config(made),
        "results": _results(made),
        "summary": object_schema(made.summary, required=False),
        "error": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/error"}]},
    }
    error = object_schema(ERROR)
    error["properties"]["type"]["enum"] = list(ERROR_TYPES)
    succeeded = {"error": {"type": "null"}, "summary": {"required": object_schema(made.summary)["required"]}}
    schema: Schema = {
        "$schema": DIALECT,
        "title": f"linattn {command} --json" if command != "linattn" else "linattn --json",
        "description": made.about,
        "type": "object",
        "additionalProperties": False,
        "required": list(parts),
        "properties": parts,
        "if": {"properties": {"status": {"const": "ok"}}},
        "then": {"properties": succeeded},
        "else": {"properties": {"error": {"$ref": "#/$defs/error"}}},
        "$defs": {"error": error},
    }
    if made.config == RECIPE:
        schema["$defs"] |= recipe_definitions()
    return schema


def _config(made: Output) -> Schema:
    if not made.config:
        return {"type": "object", "maxProperties": 0}
    full = {"$ref": "#/$defs/RunConfig"} if isinstance(made.config, str) else object_schema(made.config)
    empty = {"type": "object", "maxProperties": 0, "description": "the command line was not understood"}
    return {"anyOf": [full, empty]}


def _results(made: Output) -> Schema:
    if not made.rows:
        return {"type": "array", "maxItems": 0}
    kinds = [object_schema(fields) for fields in made.rows]
    return {"type": "array", "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}


def recipe_definitions() -> Schema:
    """`RunConfig` and its sections as definitions of a schema; every key of a resolved recipe is there."""
    from linattn_cli.settings import RunConfig

    whole = RunConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions: Schema = whole.pop("$defs")
    definitions["RunConfig"] = whole
    for definition in definitions.values():
        definition["required"] = [key for key in definition["properties"] if key != "code_sha256"]
        del definition["title"]
        for section in definition["properties"].values():
            section.pop("title", None)
    return definitions


def field_rows(command: str) -> Iterator[dict[str, Any]]:
    """Every field of a command's document as a row, for people."""
    if command == "metrics":
        yield from (_field_row("line", name, text) for name, text in METRICS.items())
        return
    made = OUTPUTS[command]
    config = {} if isinstance(made.config, str) else made.config
    groups = {"config": (config,), "results": made.rows, "summary": (made.summary,), "env": (ENV,), "error": (ERROR,)}
    if isinstance(made.config, str):
        yield _field_row("config", "*", "object, the resolved recipe; --format json has every key")
    for part, kinds in groups.items():
        merged = {name: text for fields in kinds for name, text in fields.items()}
        everywhere = [name for name in merged if all(name in fields for fields in kinds)]
        for name, text in merged.items():
            yield _field_row(part, name, text) | ({} if name in everywhere else {"required": False})


def _field_row(part: str, name: str, text: str) -> dict[str, Any]:
    types, always, meaning = split(text)
    return {"part": part, "field": name, "type": "|".join(types), "required": always, "meaning": meaning}


def quantities(command: str) -> list[str]:
    """Names in a command's summary that are numbers; a `*` in one stands for any words.

    >>> "accuracy" in quantities("train"), "run" in quantities("train")
    (True, False)
    """
    return [name for name, text in OUTPUTS[command].summary.items() if {"number", "integer"} & set(split(text)[0])]
