"""Recipes as files: finding them, reading YAML strictly, and remembering where each key stands.

Nothing here knows the schema (that is `config.py`) and nothing heavy is imported: `linattn list` stays quick.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from linattn_cli.output import CliError

KeyPath = tuple[str, ...]
_SUFFIXES = (".yaml", ".yml")
_DEEPEST = 32
_MOST_VALUES = 100_000
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_WRITTEN_BY = re.compile(r"# Resolved by linattn ([0-9A-Za-z.+-]+):")


class _Resolvers:
    """YAML 1.2 scalars: `1e-3` is a float, `010` is ten, `no` and `12:30` are strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


class _Loader(_Resolvers, yaml.SafeLoader):
    pass


class _Dumper(_Resolvers, yaml.SafeDumper):
    """Quotes exactly the strings that `_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _add_resolver(tag: str, pattern: str, first: str) -> None:
    for letter in first or [""]:
        resolvers = _Resolvers.yaml_implicit_resolvers.setdefault(letter, [])
        resolvers.append((f"tag:yaml.org,2002:{tag}", re.compile(pattern)))


_add_resolver("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_add_resolver("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789")
_add_resolver(
    "float",
    r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_add_resolver("null", r"^(?:~|null|Null|NULL)$", "~nN")
_add_resolver("null", r"^$", "")
_add_resolver("merge", r"^(?:<<)$", "<")


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(frozen=True)
class Recipe:
    """One recipe as read: its data and the place of every key.

    written_by  version of linattn that resolved it, None for one written by hand
    """

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    written_by: str | None = None

    def where(self, path: KeyPath) -> str:
        """`file, line N` of a key, or of the nearest section around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.name}, line {self.lines[path[:end]]}"
        return self.name


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no valid word resembles this one.

    >>> nearest("d_heda", ["d_head", "heads"])
    " (did you mean 'd_head'?)"
    >>> nearest("zzz", ["d_head"])
    ''
    """
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def recipe_names() -> list[str]:
    """Names of the packaged recipes, sorted."""
    files = resources.files("linattn_cli.recipes").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(_SUFFIXES))


def recipe_summary(name: str) -> str:
    """The first comment of a packaged recipe, which says what the experiment is for."""
    for line in _packaged_text(name).splitlines():
        if line.startswith("#") and (words := line.lstrip("# ").strip()):
            return words
        if line.strip() and not line.startswith("#"):
            break
    return ""


def _packaged_text(name: str) -> str:
    return (resources.files("linattn_cli.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def read_recipe(recipe: str) -> Recipe:
    """A recipe by packaged name, or by path when it ends in .yaml or holds a slash."""
    path = Path(recipe)
    if path.suffix in _SUFFIXES or "/" in recipe or "\\" in recipe:
        return parse_recipe(_read_file(path), recipe)
    names = recipe_names()
    if recipe not in names:
        hint = "linattn list recipes shows them all; a file of your own needs its path, such as ./mine.yaml"
        raise CliError(f"there is no recipe {recipe!r}{nearest(recipe, names)}", hint=hint, kind="recipe")
    return parse_recipe(_packaged_text(recipe), f"{recipe}.yaml")


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES] if path.parent.is_dir() else []
        hint = "linattn list recipes shows the packaged ones, which are given by name"
        message = f"the recipe file {path} does not exist{nearest(path.name, siblings)}"
        raise CliError(message, hint=hint, kind="recipe") from None
    except IsADirectoryError:
        hint = f"give the file itself, such as {path}/recipe.yaml"
        raise CliError(f"the recipe {path} is a folder", hint=hint, kind="recipe") from None
    except UnicodeDecodeError as error:
        message = f"the recipe file {path} is not UTF-8 text (byte {error.start})"
        raise CliError(message, hint="save it as UTF-8", kind="recipe") from None
    except (OSError, ValueError) as error:  # a path may hold what no file system takes
        message = f"the recipe file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise CliError(message, hint="check the path and its permissions", kind="recipe") from None


def parse_recipe(text: str, name: str) -> Recipe:
    """Read the YAML of one recipe; duplicate keys and anything but a mapping are refused.

    >>> parse_recipe("model:\\n  name: vla\\n", "mine.yaml").where(("model", "name"))
    'mine.yaml, line 2'
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise CliError(
                f"{name} is empty",
                hint="a recipe has sections model, task and train; seed and sweep",
                kind="recipe",
            )
        _check_nodes(node, loader)
        lines: dict[KeyPath, int] = {}
        _index(node, (), lines, name)
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise _syntax_error(error, name) from None
    except RecursionError:
        raise CliError(f"{name}: nested too deeply", hint=f"at most {_DEEPEST} levels", kind="recipe") from None
    if not isinstance(data, dict):
        raise CliError(
            f"{name}, line 1: a recipe is a mapping of sections, got {type(data).__name__}",
            hint="begin with a section such as `model:`",
            kind="recipe",
        )
    written_by = _WRITTEN_BY.match(text)
    return Recipe(name, data, lines, written_by[1] if written_by else None)


def _check_nodes(root: yaml.Node, loader: _Loader) -> None:
    """Refuse, with its place, whatever constructing the document would stumble over or never finish.

    That is a tag that no recipe needs, a scalar that does not fit its tag, an alias that holds itself, and
    aliases of aliases that grow without bound.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, around: tuple[int, ...]) -> int:
        if id(node) in around:
            raise yaml.MarkedYAMLError(problem="an alias that holds itself", problem_mark=node.start_mark)
        if len(around) > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_DEEPEST} levels", problem_mark=node.start_mark)
        if id(node) in sizes:
            return sizes[id(node)]
        if node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.MarkedYAMLError(problem=f"the tag {tag} is not for recipes", problem_mark=node.start_mark)
        inside = (*around, id(node))
        total = 1
        if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":merge"):
            try:
                loader.construct_object(node)
            except (ValueError, KeyError):
                shown = str(node.value)[:40]
                kind = node.tag.rpartition(":")[2]
                problem = f"{shown!r} is no {kind}" if len(node.value) <= 40 else f"{shown!r}... is no {kind} to read"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        elif isinstance(node, yaml.MappingNode):
            total += sum(size(key, inside) + size(value, inside) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(size(item, inside) for item in node.value)
        if total > _MOST_VALUES:
            problem = f"its aliases make more than {_MOST_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        sizes[id(node)] = total
        return total

    size(root, ())


def _index(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    """Note the line of every key under `node`, refusing duplicates, which PyYAML drops silently."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _index(item, path, {}, name)
        return
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            shown = getattr(key_node, "value", "")
            shown = f", got {shown}" if isinstance(shown, str) else ""
            raise CliError(f"{name}, line {line}: a key must be a word{shown}", hint="quote it", kind="recipe")
        key = (*path, str(key_node.value))
        if key in lines:
            raise CliError(
                f"{name}, line {line}: duplicate key {'.'.join(key)}, first given on line {lines[key]}",
                hint="keep one of the two",
                kind="recipe",
            )
        lines[key] = line
        if value_node.start_mark.index > key_node.start_mark.index:  # else an alias back to something seen
            _index(value_node, key, lines, name)


def _syntax_error(error: yaml.YAMLError, name: str) -> CliError:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    return CliError(f"{where}: not valid YAML: {problem}", hint="check indentation, quotes and colons", kind="recipe")


def parse_value(text: str, label: str = "the value") -> Any:
    """One YAML value as `--set` takes it; `CliError` that begins with `label` for one that cannot be read.

    >>> parse_value("1e-3"), parse_value("true"), parse_value("[1, 2]"), parse_value("vla"), parse_value("")
    (0.001, True, [1, 2], 'vla', None)
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, loader)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    except RecursionError:
        problem = f"nested deeper than {_DEEPEST} levels"
    raise CliError(f"{label}: the value is not valid YAML: {problem}", hint="quote it", kind="recipe")


def dump_yaml(data: dict[str, Any]) -> str:
    """Data as block-style YAML in the given order, read back unchanged by `parse_recipe`."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)
