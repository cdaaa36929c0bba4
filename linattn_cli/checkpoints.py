"""Checkpoints: everything a run needs to go on bit for bit, checked before it is trusted.

`checkpoints/step-N/` holds::

    model.safetensors   the weights
    state.pt            optimiser and random-number state, read with `weights_only=True`
    manifest.json       size and SHA-256 of the two, so that damage is found and named

It is written to a temporary folder, synced and renamed, so a folder called `step-N` is always whole; the
last two are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from linattn_cli import __version__
from linattn_cli.output import CliError
from linattn_cli.runs import CHECKPOINTS, fsync_folder, newer_format, resume_command, storage_errors, write_synced

SCHEMA_VERSION = 1
KEEP = 2
MODEL = "model.safetensors"
STATE = "state.pt"
MANIFEST = "manifest.json"

_NAME = re.compile(r"step-(\d+)")


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the message says which file and how."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` optimiser steps."""

    step: int
    path: Path
    model: dict[str, Tensor]
    state: dict[str, Any]


def list_steps(run: Path) -> list[int]:
    """Steps that have a checkpoint, ascending.

    >>> list_steps(Path("no/such/run"))
    []
    """
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return []
    with storage_errors(folder):
        names = os.listdir(folder)
    return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))


def save(run: Path, step: int, model: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-N` and prune the older ones down to the last two."""
    # Tied weights share memory, which safetensors refuses; a copy of each is small and loads back the same.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    files = {MODEL: safetensors.torch.save(tensors), STATE: buffer.getvalue()}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "linattn": __version__,
        "step": step,
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
        },
    }
    parent = run / CHECKPOINTS
    final = parent / f"step-{step}"
    temporary = parent / f".step-{step}.{os.getpid()}.tmp"
    with storage_errors(final):
        parent.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            for name, data in files.items():
                write_synced(temporary / name, data)
            write_synced(temporary / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
            fsync_folder(temporary)
            if final.exists():
                _remove(final)
            os.rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        fsync_folder(parent)
    prune(run)
    return final


def prune(run: Path) -> None:
    """Keep the last two checkpoints, and clear what killed processes left behind."""
    parent = run / CHECKPOINTS
    if not parent.is_dir():
        return
    with storage_errors(parent):
        for old in list_steps(run)[:-KEEP]:
            _remove(parent / f"step-{old}")
        _sweep(parent)


def load(run: Path, step: int | None = None) -> Checkpoint | None:
    """Read a checkpoint: the newest, or that of `step`; None when the run has none yet.

    A damaged one is never skipped silently: the error (exit 2) names it and offers the one before.
    """
    steps = list_steps(run)
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CliError(f"run {run} has no checkpoint of step {step}", hint=f"checkpoints: {have}", kind="checkpoint")
    if not steps:
        return None
    wanted = steps[-1] if step is None else step
    try:
        return _read(run / CHECKPOINTS / f"step-{wanted}", wanted)
    except DamagedCheckpoint as error:
        raise CliError(f"checkpoint {error}", hint=_offer(run, wanted), kind="damaged_checkpoint") from None


def discard_after(run: Path, step: int) -> list[int]:
    """Remove the checkpoints after `step`, which a resume from `step` makes obsolete; return their steps."""
    newer = [other for other in list_steps(run) if other > step]
    for other in newer:
        with storage_errors(run):
            _remove(run / CHECKPOINTS / f"step-{other}")
    return newer


def _read(path: Path, step: int) -> Checkpoint:
    with storage_errors(path):
        manifest = _read_manifest(path, step)
        data = {name: _read_checked(path / name, expected) for name, expected in manifest["files"].items()}
    try:
        model = safetensors.torch.load(data[MODEL])
        state = torch.load(io.BytesIO(data[STATE]), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(f"{path} cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{path} cannot be read: {STATE} holds a {type(state).__name__}, not a state")
    return Checkpoint(step, path, model, state)


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, files = int(manifest["schema_version"]), manifest["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
        saved_step, writer = int(manifest["step"]), str(manifest.get("linattn", ""))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is damaged: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedCheckpoint(f"{path} is damaged: {MANIFEST} cannot be read") from None
    if version > SCHEMA_VERSION:
        raise newer_format(path, writer, version, SCHEMA_VERSION)
    if set(expected) != {MODEL, STATE} or saved_step != step:
        raise DamagedCheckpoint(f"{path} is damaged: {MANIFEST} does not describe step {step}")
    return {"files": expected}


def _read_checked(path: Path, expected: tuple[int, str]) -> bytes:
    size, digest = expected
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.parent} is damaged: {path.name} is missing") from None
    if len(data) != size:
        raise DamagedCheckpoint(f"{path.parent} is damaged: {path.name} has {len(data)} bytes, expected {size}")
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedCheckpoint(f"{path.parent} is damaged: {path.name} does not match its checksum")
    return data


def _offer(run: Path, step: int) -> str:
    for other in reversed([s for s in list_steps(run) if s < step]):
        with contextlib.suppress(DamagedCheckpoint, CliError):
            _read(run / CHECKPOINTS / f"step-{other}", other)
            return f"step {other} is whole; continue from it: {resume_command(run)} --from-step {other}"
    return "no earlier checkpoint is whole; start again with another --out"


def _remove(path: Path) -> None:
    # Renamed first: a folder that is half deleted must not look like a checkpoint.
    trash = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Clear what killed processes left behind; the lock says that nobody else is writing."""
    for name in os.listdir(folder):
        if name.startswith(".step-"):
            shutil.rmtree(folder / name, ignore_errors=True)
