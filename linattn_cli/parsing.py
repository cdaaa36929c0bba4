"""What words on a command line mean: numbers, lists, names, choices; `CliError` names the option and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from linattn_cli.output import CliError

T = TypeVar("T")

LARGEST = 2**63 - 1
_SUFFIXES = {"k": 1024, "m": 1024 * 1024}


def parse_int(text: str, option: str = "the value") -> int:
    """A whole number; `k` and `m` count in 1024s.

    >>> parse_int("128k"), parse_int("73")
    (131072, 73)
    """
    word = text.strip().lower()
    factor = _SUFFIXES.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isascii() or not digits.isdigit():
        raise CliError(f"{option}: {text!r} is not a whole number", hint="write 4096 or 4k, which is 4 * 1024")
    value = int(digits) * factor if len(digits) < 20 else LARGEST + 1
    if value > LARGEST:
        raise CliError(f"{option}: {text[:40]} is too large", hint=f"the largest number is {LARGEST}")
    return value


def parse_float(text: str, option: str = "the value") -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise CliError(f"{option}: {text!r} is not a finite number", hint="write 0.001 or 1e-3")
    return value


def _parse_list(text: str, option: str, parse: Callable[[str], T]) -> list[T]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise CliError(f"{option}: {text!r} has an empty entry", hint=f"separate by commas: {option} a,b")
    values = [parse(word) for word in words]
    for index, value in enumerate(values):
        if value in values[:index]:
            raise CliError(f"{option}: {words[index]} is given twice", hint="give each value once")
    return values


def parse_ints(text: str, option: str = "the list") -> list[int]:
    """A comma-separated list of whole numbers, each value once.

    >>> parse_ints("4,8,1k")
    [4, 8, 1024]
    """
    return _parse_list(text, option, lambda word: parse_int(word, option))


def parse_floats(text: str, option: str = "the list") -> list[float]:
    """A comma-separated list of finite numbers, each value once.

    >>> parse_floats("1e-3,3e-4")
    [0.001, 0.0003]
    """
    return _parse_list(text, option, lambda word: parse_float(word, option))


def parse_names(text: str, valid: Iterable[str], option: str = "the list", *, own: bool = False) -> list[str]:
    """A comma-separated list of known names; `all` is every one of them.

    own  mixers of the user's own, `path/to/mine.py:MyMixer`, are names too; they are loaded

    >>> parse_names("vla,linear", ["linear", "vla"])
    ['vla', 'linear']
    """
    known = list(valid)
    if text.strip() == "all":
        return known

    def parse(word: str) -> str:
        from linattn_cli import own_mixer

        if own and own_mixer.is_own(word):
            own_mixer.allow(word)
            own_mixer.load(word)
            return word
        if word not in known:
            from linattn_cli.recipe import nearest

            mine = "; your own is path/to/mine.py:MyMixer" if own else ""
            raise CliError(
                f"{option}: there is no {word!r}{nearest(word, known)}", hint=f"there are {', '.join(known)}{mine}"
            )
        return word

    return _parse_list(text, option, parse)


def parse_arms(text: str, option: str = "--models") -> list[str]:
    """A comma-separated list of mixers, each with settings of its own behind colons; `all` is every mixer.

    The names are checked where the variants of a recipe are known.

    >>> parse_arms("linear,vla:penalty=none")
    ['linear', 'vla:penalty=none']
    """
    if text.strip() == "all":
        from linattn_cli.kernels.registry import MIXERS

        return list(MIXERS)
    return _parse_list(text, option, str)


def check_choice(option: str, value: str, choices: Sequence[str], *, hint: str = "") -> None:
    """`CliError` where an option has another value than its choices, with the nearest of them."""
    if value not in choices:
        from linattn_cli.recipe import nearest

        raise CliError(
            f"{option} must be one of {', '.join(choices)}; got {value!r}{nearest(value, choices)}", hint=hint
        )


def option_of(stray: str, options: Iterable[str]) -> str | None:
    """How to name a mixer or task that stands where no argument belongs: `train vla`, or `--models vla, linear`.

    >>> option_of("vla,", {"--models"}), option_of("copy", {"--model", "--task"}), option_of("x", {"--model"})
    ('name it in --models: a list has commas and no spaces', 'name it with --task copy', None)
    """
    from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
    from linattn_cli.tasks import TASKS

    name, known = stray.strip(","), set(options)
    if name in (*MIXERS, *PRIMITIVES) and "--models" in known:
        return "name it in --models: a list has commas and no spaces"
    for names, option in ((MIXERS, "--model"), (TASKS, "--task")):
        if name in names and option in known:
            return f"name it with {option} {name}"
    return None
