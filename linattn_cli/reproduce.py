"""The command line that computes a saved document again, from the settings it recorded."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linattn_cli.own_mixer import is_own
from linattn_cli.runs import RECIPE

Words = list[str]


def of_run(path: Path, config: Mapping[str, Any]) -> str:
    """Train a run again, from its own recipe.

    >>> of_run(Path("runs/a b"), {"model": {"name": "vla"}})
    "linattn train --recipe 'runs/a b/recipe.yaml'"
    """
    trust = ["--trust"] if is_own(str(config["model"]["name"])) else []
    return line(["train", "--recipe", str(path / RECIPE), *trust])


def of_sweep(path: Path, recipes: Sequence[Path]) -> list[str]:
    """Run a sweep again in a new folder; each further recipe is a grid that a resume added."""
    new = f"{path}-again"
    first = ["capacity-sweep", "--recipe", str(recipes[0]), "--out", new]
    return [
        line(first),
        *(line(["capacity-sweep", "--resume", "--out", new, "--recipe", str(r)]) for r in recipes[1:]),
    ]


def of_document(document: Mapping[str, Any]) -> str | None:
    """The command that printed a document; None where it does not say enough.

    >>> of_document({"command": "latency", "env": {"device": "cpu"}, "summary": {}, "results": [], "config": {
    ...     "models": ["softmax", "vla"], "seq_lens": [256, 512], "mode": "train"}})
    'linattn latency --models vla --seq-lens 256,512 --mode train --device cpu'
    """
    made = {
        "latency": _latency,
        "verify-scan": _verify_scan,
        "probe-norm": _probe_norm,
        "eval": _eval,
    }.get(document["command"])
    words = None if made is None or not document["config"] else made(document)
    if words is None:
        return None
    device = document["env"].get("device")
    return line([str(document["command"]), *words, *(["--device", device] if device else [])])


def line(words: Sequence[str]) -> str:
    """A command line of ours, quoted for a shell."""
    return shlex.join(["linattn", *words])


def _options(config: Mapping[str, Any], names: Mapping[str, str]) -> Words:
    """Options by the keys of `config`; lists joined by commas, what is absent left out."""
    words: Words = []
    for key, option in names.items():
        value = config.get(key)
        if value is None or value == []:
            continue
        words += [option, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


def _latency(document: Mapping[str, Any]) -> Words:
    config = document["config"]
    models = [name for name in config["models"] if name != "softmax"]
    names = {
        "seq_lens": "--seq-lens",
        "mode": "--mode",
        "impl": "--impl",
        "batch": "--batch",
        "heads": "--heads",
        "d_head": "--d-head",
        "dtype": "--dtype",
        "repetitions": "--repetitions",
        "budget_s": "--budget-s",
    }
    words = _options({"models": models}, {"models": "--models"}) + _options(config, names)
    words += ["--with-fla"] if config.get("with_fla") else []
    words += ["--cuda-graph"] if config.get("cuda_graph") else []
    return words + (["--no-gate"] if config.get("gate") is False else [])


def _verify_scan(document: Mapping[str, Any]) -> Words:
    config = document["config"]
    names = {
        "models": "--models",
        "forms": "--forms",
        "dtypes": "--dtypes",
        "seq_len": "--seq-len",
        "d_head": "--d-head",
        "seed": "--seed",
        "inject": "--inject",
    }
    words = _options(config, names) + (["--quick"] if config.get("quick") else [])
    rows = document["results"]
    words += ["--published"] if any(row.get("form") == "as printed" for row in rows) else []
    # Kernels that ran without a GPU ran in the interpreter.
    kernels = any(str(row.get("form")).startswith("triton") and row.get("passed") is not None for row in rows)
    return words + (["--interpret"] if kernels and document["env"].get("device") == "cpu" else [])


def _probe_norm(document: Mapping[str, Any]) -> Words:
    config = document["config"]
    if isinstance(config["source"], list):
        words = [word for run in config["source"] for word in ("--run", run)]
        return words + _options(config, {"seq_len": "--seq-len", "step": "--step", "impl": "--impl"})
    arms = [_arm(name, config.get("options", {}).get(name, {})) for name in config["models"]]
    words = _options({"models": arms}, {"models": "--models"})
    names = {
        "source": "--source",
        "seq_len": "--seq-len",
        "d_head": "--d-head",
        "heads": "--heads",
        "seeds": "--seeds",
        "dtype": "--dtype",
        "impl": "--impl",
    }
    raw = "unnormalised_repeated_key_log10" in document["summary"]
    return words + _options(config, names) + (["--no-normalise-gate"] if raw else [])


def _arm(name: str, options: Mapping[str, Any]) -> str:
    """A mixer with the options that are not its defaults, as `--models` takes it.

    >>> _arm("vla", {"penalty": "none", "lambda0": 0.1, "normalise_gate": False})
    'vla:penalty=none'
    """
    from linattn_cli.kernels.registry import MIXERS

    mixer = name.split(":")[0]
    if is_own(name) or mixer not in MIXERS:
        return name
    known = MIXERS[mixer].options
    # --no-normalise-gate says that one.
    changed = {k: v for k, v in options.items() if k in known and v != known[k].default and k != "normalise_gate"}
    return ":".join([mixer, *(f"{key}={str(value).lower()}" for key, value in changed.items())])


def _eval(document: Mapping[str, Any]) -> Words:
    whole = [row for row in document["results"] if row.get("distance") == "all"]
    run = document["summary"].get("run")
    if run is None or not whole:
        return []
    words = [str(run), "--step", str(whole[0]["step"]), "--examples", str(whole[0]["sequences"])]
    sizes = {key: list(dict.fromkeys(row.get(key) for row in whole)) for key in ("n_pairs", "seq_len", "updates")}
    given = {"n_pairs": "--n-pairs"} if sizes["n_pairs"] != [None] else {}
    # Each n_pairs is tried with each length, unless the lengths follow from n_pairs.
    given |= {"seq_len": "--seq-lens"} if _crossed(whole) else {}
    given |= {"updates": "--updates"} if sizes["updates"] not in ([None], [0]) else {}
    words += _options(sizes, given)
    config = document["config"]
    words += ["--dtype", config["train"]["dtype"], "--impl", config["model"]["impl"], "--seed", str(config["seed"])]
    return words + (["--trust"] if is_own(str(config["model"]["name"])) else [])


def _crossed(whole: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every n_pairs was tried with every seq_len."""
    pairs = {(row.get("n_pairs"), row["seq_len"]) for row in whole}
    return len(pairs) == len({n for n, _ in pairs}) * len({length for _, length in pairs})
