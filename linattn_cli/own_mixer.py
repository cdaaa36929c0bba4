"""A mixer of the user's own, named by file and class: `--model path/to/mine.py:MyMixer`.

This is the one place where a name becomes an entry of the registry, whether it is one of ours or not. Loading
a file runs it, so a name that comes from a recipe or a run folder, which may be somebody else's, is only
loaded where the user said so (`allow`); the command line is the user speaking.

What the class must be is in `layers/own.py`. The file has to stand alone: its copy in the run folder is what
repeats the run. Nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linattn_cli.kernels.registry import MIXERS, Mixer, Option
from linattn_cli.output import CliError
from linattn_cli.recipe import KeyPath, nearest
from linattn_cli.runs import CODE

GIVEN = ("d_model", "heads", "d_head")
"""What a constructor is given if it takes it; the other parameters without a default cannot be filled."""

BACKBONE = ("kv_heads", "output_norm", "short_conv", "rotary", "impl", "chunk_size")
"""Settings of the backbone that a constructor may take as well."""

DRAWN = ("q", "k", "v", "u", "beta", "log_decay")
"""Tensors of a form that verify-scan and latency can draw."""

_OWN = re.compile(r"(.*?\.py)(?::(.*))?", re.DOTALL)
_allowed: set[str] = set()


@dataclass(frozen=True)
class Own:
    """A class that was loaded.

    entry     it as an entry of the registry
    path      the file
    class_    its name in the file
    source    the file's text as it was loaded
    sha256    of that text
    layer     the class itself
    is_mixer  whether it is a `Mixer`; else it is any other `nn.Module`
    takes     which of GIVEN and BACKBONE its constructor takes
    forward   which of state, return_state and padding_mask its forward takes
    form      its form, None where it has none
    """

    entry: Mixer
    path: Path
    class_: str
    source: str
    sha256: str
    layer: Any
    is_mixer: bool
    takes: frozenset[str]
    forward: frozenset[str]
    form: Any = None

    @property
    def carries_state(self) -> bool:
        """Whether it can go on token by token."""
        return {"state", "return_state"} <= self.forward

    @property
    def has_oracle(self) -> bool:
        """Whether its form has a serial recurrence to be held to, on tensors that can be drawn."""
        return self.form is not None and "reference" in self.entry.impls and not self.undrawable

    @property
    def undrawable(self) -> list[str]:
        """Tensors that its form needs and that nobody here knows how to draw."""
        parameters = inspect.signature(self.form).parameters.values() if self.form is not None else ()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        return [name for name in needed if name not in DRAWN]

    def absences(self) -> Iterator[str]:
        """What it does not have, and what therefore is not done; said, not guessed."""
        if not self.carries_state:
            yield "no state: it is run on whole sequences; decoding, size and norms of a state are not measured"
        if "padding_mask" not in self.forward:
            yield "no padding_mask: padded batches are refused"
        if self.form is None:
            yield "no form: verify-scan checks the layer, latency times it with its projections"
        elif self.undrawable:
            needed = ", ".join(self.undrawable)
            yield f"a form that needs {needed}; only {', '.join(DRAWN)} can be drawn, so the layer is checked instead"
        elif not self.has_oracle:
            yield "no serial oracle (impls has no reference): its form is not proved, only the layer is checked"
        left = [name for name in (*GIVEN[1:], "output_norm") if name not in self.takes]
        if left:
            yield f"no {', no '.join(left)}: those settings of the backbone do not reach it"


_loaded: dict[tuple[str, str, str], Own] = {}


def is_own(name: object) -> bool:
    """Whether a model's name means a file, complete or not.

    >>> is_own("mine.py:MyMixer"), is_own("mine.py"), is_own("vla")
    (True, True, False)
    """
    return isinstance(name, str) and _OWN.fullmatch(name) is not None


def split_name(name: str) -> tuple[str, str]:
    """File and class.

    >>> split_name("a folder/mine.py:MyMixer")
    ('a folder/mine.py', 'MyMixer')
    """
    found = _OWN.fullmatch(name)
    assert found is not None  # `is_own` says so
    return found[1], found[2] or ""


def allow(name: str) -> None:
    """Let the file that `name` means be loaded in this process: the user asked for it."""
    _allowed.add(os.path.abspath(split_name(name)[0]))


def absolute_name(name: str) -> str:
    """The name as it can be read from any folder."""
    file, class_ = split_name(name)
    return f"{os.path.abspath(file)}:{class_}"


def short_name(name: str) -> str:
    """A name for folders and tables: the class, or the mixer's own name.

    >>> short_name("mine.py:MyMixer"), short_name("vla")
    ('MyMixer', 'vla')
    """
    return split_name(name)[1] if is_own(name) else name


def portable_name(name: str, file: str = CODE) -> str:
    """The name by which a recipe beside a copy called `file` finds it.

    >>> portable_name("../mine.py:MyMixer"), portable_name("vla")
    ('mixer.py:MyMixer', 'vla')
    """
    return f"{file}:{split_name(name)[1]}" if is_own(name) else name


def find_mixer(name: str) -> Mixer:
    """The registry's entry of a mixer, or that of a class of the user's own, which is loaded.

    Raises `CliError` (exit 2) that names what is not there and the nearest that is.
    """
    if is_own(name):
        return load(name).entry
    if name not in MIXERS:
        raise CliError(f"there is no model {name!r}{nearest(name, MIXERS)}", hint=unknown_hint(MIXERS))
    return MIXERS[name]


def unknown_hint(names: Mapping[str, Any]) -> str:
    """What to say of a model that does not exist."""
    return f"there are {', '.join(names)}; your own is path/to/mine.py:MyMixer"


def load(name: str) -> Own:
    """Load the class that `name` means; the same content is loaded once. Raises `CliError` (exit 2)."""
    file, class_ = split_name(name)
    path = Path(file)
    if os.path.abspath(path) not in _allowed:
        raise untrusted(name, "a configuration")
    source = _read(path)
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    key = os.path.abspath(path), class_, sha256
    if key not in _loaded:
        _loaded[key] = _load(name, path, class_, source, sha256)
    return _loaded[key]


def source_of(sha256: str) -> str:
    """The text of a file that was loaded in this process, as it was then."""
    return next(own.source for own in _loaded.values() if own.sha256 == sha256)


def untrusted(name: str, by: str) -> CliError:
    """The refusal to run code that only a file names."""
    return CliError(
        f"{by} names code to run, {name}, which may be somebody else's",
        hint="add --trust once you have read it; train and eval also take your own copy of it: "
        f"--model path/to/{CODE}:{split_name(name)[1]}",
        kind="untrusted_code",
    )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        there = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise CliError(
            f"there is no file {path}{nearest(str(path), there)}", hint="check the path", kind="code"
        ) from None
    except UnicodeDecodeError:
        raise CliError(f"{path} is not UTF-8 text", hint="save it as UTF-8", kind="code") from None


def _load(name: str, path: Path, class_: str, source: str, sha256: str) -> Own:
    digest = hashlib.sha256(f"{os.path.abspath(path)}\n{source}".encode()).hexdigest()[:12]
    module = _execute(path, source, f"linattn_own_{digest}")
    layer = _class_of(module, path, class_)
    from torch import nn

    from linattn_cli.layers.base import Mixer as Base

    if not (inspect.isclass(layer) and issubclass(layer, nn.Module)):
        kind = type(layer).__name__
        raise CliError(
            f"{path}: {class_} is a {kind}, not a layer"
            if not inspect.isclass(layer)
            else f"{path}: {class_} is no layer",
            hint="it must be a subclass of linattn_cli.layers.Mixer or of torch.nn.Module",
            kind="code",
        )
    is_mixer = issubclass(layer, Base)
    takes, options = _constructor(layer, path, class_, is_mixer)
    form = getattr(layer, "form", None)
    every = ("reference", "scan", "chunk", "triton")
    impls = tuple(getattr(layer, "impls", ("chunk",) if form is not None else every if is_mixer else ()))
    if unknown := [impl for impl in impls if impl not in every]:
        raise CliError(f"{path}: {class_}.impls has {unknown[0]!r}", hint=f"there are {', '.join(every)}", kind="code")
    # Forms and layers of the registry are `module:name`; these two live in a module of their own.
    home = ModuleType(f"{module.__name__}_{class_}")
    home.layer, home.form = layer, form  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    summary = (inspect.getdoc(layer) or "a mixer of your own").splitlines()[0]
    entry = Mixer(
        name,
        summary,
        "",
        str(path),
        f"{home.__name__}:form" if form is not None else "",
        f"{home.__name__}:layer",
        options,
        impls,
    )
    return Own(entry, path, class_, source, sha256, layer, is_mixer, takes, _forward(layer, is_mixer), form)


def _execute(path: Path, source: str, name: str) -> ModuleType:
    """Run the file as a module that nothing else can import by accident."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and NamedTuples look their module up
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        del sys.modules[name]
        beside = (path.parent / f"{str(error.name).partition('.')[0]}.py").exists()
        hint = "the file must stand alone, its copy goes into the run folder: move that code into it"
        raise CliError(
            f"{where(error, path)}: there is no module {error.name!r}",
            hint=hint if beside else "install it",
            kind="code",
        ) from error
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise code_error(error, path, "cannot be loaded") from error
    return module


def _class_of(module: ModuleType, path: Path, class_: str) -> Any:
    from torch import nn

    mine = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    classes = [key for key, value in mine.items() if inspect.isclass(value) and issubclass(value, nn.Module)]
    there = f"it has {', '.join(classes)}" if classes else "it has no class that is a torch.nn.Module"
    if not class_:
        example = f"{path}:{classes[0] if classes else 'MyMixer'}"
        raise CliError(f"{path} needs the name of a class behind it: {example}", hint=there, kind="code")
    if not hasattr(module, class_):
        raise CliError(f"{path} has no class {class_!r}{nearest(class_, classes)}", hint=there, kind="code")
    return getattr(module, class_)


def _constructor(layer: Any, path: Path, class_: str, is_mixer: bool) -> tuple[frozenset[str], dict[str, Option]]:
    """Which settings the constructor takes, and its own ones, which become options."""
    takes: set[str] = set()
    options: dict[str, Option] = {}
    known = (*GIVEN, *BACKBONE)
    for name, parameter in list(inspect.signature(layer.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes |= set(known) if is_mixer else set()
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif name in known:
            takes.add(name)
        elif parameter.default is parameter.empty:
            raise CliError(
                f"{path}: {class_} needs {name!r}, which no setting of the backbone fills",
                hint=f"give it a default, then --set model.options.{name}=... sets it; filled are {', '.join(known)}",
                kind="code",
            )
        elif parameter.default is None or isinstance(parameter.default, (bool, int, float, str)):
            options[name] = Option(parameter.default, f"a parameter of {class_}")
    return frozenset(takes), options


def _forward(layer: Any, is_mixer: bool) -> frozenset[str]:
    wanted = ("state", "return_state", "padding_mask")
    parameters = inspect.signature(layer.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(name for name in wanted if name in parameters or anything)


def where(error: BaseException, path: Path) -> str:
    """`file, line N` of the place in the user's file where an error came from, or the file alone."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{path}, line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def code_error(error: BaseException, path: Path, what: str) -> CliError:
    """An error that the user's own code raised, as theirs to fix: file, line, and what was raised."""
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())[:300]
    return CliError(
        f"{where(error, path)}: it {what}: {type(error).__name__}{f': {said}' if said else ''}",
        hint="this is code of your own; --debug shows the traceback",
        kind="code",
    )


def names_in(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Every name of a file in the data of a recipe, wherever it stands, with its place.

    >>> list(names_in({"model": {"name": "a.py:A"}, "sweep": {"models": ["vla", "b.py:B"]}}))
    [(('model', 'name'), 'a.py:A'), (('sweep', 'models', '1'), 'b.py:B')]
    """
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    seen = set()  # YAML anchors make one mapping stand in many places, even in itself
    while waiting:
        path, value = waiting.pop()
        if is_own(value):
            yield path, value
        elif isinstance(value, (Mapping, list)) and id(value) not in seen:
            seen.add(id(value))
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            waiting += reversed([((*path, str(key)), part) for key, part in pairs])


def replace_at(data: Any, path: KeyPath, value: Any) -> None:
    """Replace a value in nested mappings and lists."""
    for part in path[:-1]:
        data = data[int(part)] if isinstance(data, list) else data[part]
    data[int(path[-1]) if isinstance(data, list) else path[-1]] = value
