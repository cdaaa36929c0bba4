"""`linattn probe-norm`: what is asked for, the rows and tables of what was found, and the checks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn_cli.capacity import parse_arm
from linattn_cli.config import load_run_config
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.output import CliError, Document
from linattn_cli.runs import RECIPE, require_run
from linattn_cli.settings import RunConfig

SEQ_LEN = 1000
OPERATOR, MODEL = "operator", "model"

MATRIX_ERROR = 1e-9
KRYLOV_RESIDUAL = 1e-4
GRADIENT_ERROR = 1e-6
"""Largest errors that rounding can explain, in float64; beyond them a number printed here is wrong."""

MEMORY_HINT = "lower --seq-len, --heads or --d-head"


@dataclass(frozen=True)
class Request:
    """The command line of `probe-norm`; None is the default."""

    models: list[str] | None
    source: str | None
    runs: list[Path]
    step: int | None
    seq_len: int | None
    d_head: int | None
    heads: int | None
    seeds: list[int]
    sets: list[str]
    normalise_gate: bool
    device: str | None
    dtype: str | None
    impl: str | None
    plot: Path | None
    trust: bool = False


def run(request: Request, doc: Document) -> None:
    """Measure every subject and fill the document: rows, verdicts, tables, and failure where a check found an error."""
    from linattn_cli import environment
    from linattn_cli.probe_blowup import blow_up
    from linattn_cli.probe_claims import claims
    from linattn_cli.probe_measure import Measurement, measure

    doc.memory_hint = MEMORY_HINT
    _check(request)
    jobs = _jobs(request)
    device = environment.resolve_device(request.device or "auto")
    for job in jobs:
        environment.resolve_dtype(job.config.train.dtype, device)
    dtypes = list(dict.fromkeys(job.config.train.dtype for job in jobs))
    impls = [_resolved_impl(job.config, device) for job in jobs]
    doc.config = _described(request, jobs)
    doc.begin(
        device=device,
        dtype=",".join(dtypes),
        impl=",".join(dict.fromkeys(impls)),
        seed=request.seeds[0] if len(request.seeds) == 1 else None,
    )
    found: list[Measurement] = []
    with doc.progress(len(jobs), "probe-norm") as bar:
        for job, impl in zip(jobs, impls, strict=True):
            found += [measure(subject, impl) for subject in _subjects(request, job, device)]
            bar.update(1)
    blown = None if request.normalise_gate else blow_up(seed=request.seeds[0])
    verdicts = claims(found, blown)
    _report(doc, found, verdicts, blown)
    if request.plot is not None:
        _draw(request.plot, doc, found, blown)
        doc.note(f"plot saved in {request.plot}")
    _judge(doc, found, verdicts)


def _check(request: Request) -> None:
    if request.plot is not None:
        from linattn_cli.plotting import check_plot_path

        check_plot_path(request.plot)
    if request.runs:
        given = {
            "--models": request.models,
            "--source": request.source,
            "--d-head": request.d_head,
            "--heads": request.heads,
            "--set": request.sets or None,
            "--no-normalise-gate": None if request.normalise_gate else True,
            "--seeds": None if request.seeds == [0] else True,
        }
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise CliError(
                f"{wrong[0]} does not go with --run: the run decides it", hint=f"leave {wrong[0]} or --run out"
            )
    elif request.step is not None:
        raise CliError("--step belongs to --run", hint="add --run RUN")
    if request.seq_len is not None and request.seq_len < 1:
        raise CliError(f"--seq-len must be at least 1, got {request.seq_len}")


@dataclass(frozen=True)
class Job:
    """A model and a seed, or a run folder."""

    name: str
    config: RunConfig
    seed: int
    run: Path | None = None


def _jobs(request: Request) -> list[Job]:
    common: dict[str, Any] = {"model.impl": request.impl, "train.dtype": request.dtype}
    if request.runs:
        jobs = []
        for path in request.runs:
            require_run(path)
            config = load_run_config(str(path / RECIPE), overrides=common, trust=request.trust)
            jobs.append(Job(config.model.name, config, config.seed, path))
        return jobs
    common |= {"model.d_head": request.d_head, "model.heads": request.heads}
    jobs = []
    for arm in [parse_arm(name) for name in request.models or _all_that_have(request.impl)]:
        if "seed" in arm.changes:
            raise CliError(f"--models: {arm.name} sets a seed", hint="use --seeds")
        own = dict(arm.changes)
        if own["model.name"] == "vla" and not request.normalise_gate:
            own["model.options.normalise_gate"] = False
        config = load_run_config(sets=request.sets, overrides=common | own)
        jobs += [Job(arm.name, config, seed) for seed in request.seeds]
    if not request.normalise_gate and all(job.config.model.name != "vla" for job in jobs):
        raise CliError("--no-normalise-gate is an option of vla, which is not among --models", hint="add vla to them")
    return jobs


def _all_that_have(impl: str | None) -> list[str]:
    """Every mixer, or those with the implementation asked for."""
    every = list(MIXERS)
    return [name for name in every if impl in MIXERS[name].impls] or every


def _resolved_impl(config: RunConfig, device: Any) -> str:
    from linattn_cli import environment

    impl = config.model.impl
    found = environment.resolve_impl(impl, device, config.train.dtype)
    return impl if "/" in found else found


def _subjects(request: Request, job: Job, device: Any) -> list[Any]:
    import torch

    from linattn_cli import probe_source

    if job.run is not None:
        return probe_source.run_subjects(job.run, job.config, seq_len=request.seq_len, step=request.step, device=device)
    tokens = request.seq_len or SEQ_LEN
    how: dict[str, Any] = {"seq_len": tokens, "seed": job.seed, "device": device, "name": job.name}
    if request.source == MODEL:
        return probe_source.model_subjects(job.config, **how)
    return [probe_source.operator_subject(job.config, dtype=getattr(torch, job.config.train.dtype), **how)]


def _described(request: Request, jobs: list[Job]) -> dict[str, Any]:
    models = {job.name: job.config.model for job in jobs}
    first = jobs[0].config
    return {
        "source": [str(path) for path in request.runs] or request.source or OPERATOR,
        "models": list(models),
        "options": {name: model.options for name, model in models.items()},
        "seq_len": request.seq_len or (None if request.runs else SEQ_LEN),
        "d_head": first.model.d_head,
        "heads": first.model.heads,
        "seeds": list(dict.fromkeys(job.seed for job in jobs)),
        "step": request.step,
        "dtype": list(dict.fromkeys(job.config.train.dtype for job in jobs)),
        "impl": first.model.impl,
        "plot": request.plot,
    }


def _draw(path: Path, doc: Document, found: Sequence[Any], blown: Any) -> None:
    from linattn_cli import plotting, probe_tables
    from linattn_cli.probe_plot import picture
    from linattn_cli.render import jsonable

    raw = {} if blown is None else {"unnormalised_log10_by_step": _by_step(blown)}
    rows = [jsonable(probe_tables.row(m, series=True)) for m in found]
    plotting.save(path, picture(jsonable(doc.config), doc.env, rows, jsonable(raw)))


def _by_step(blown: Any) -> dict[str, list[float]]:
    return {"repeated_key": blown.repeated.tolist(), "random_keys": blown.random.tolist()}


def _report(doc: Document, found: Sequence[Any], verdicts: Sequence[Any], blown: Any) -> None:
    from linattn_cli import probe_tables

    series = doc.fmt == "json"
    rows = [probe_tables.row(m, series=series) for m in found]
    doc.results = [probe_tables.condensed(row) for row in rows] if doc.fmt == "markdown" else rows
    if series:
        doc.summary = {
            claim.key: {"claim": claim.claim, "holds": claim.holds, "value": claim.value, "text": claim.text}
            for claim in verdicts
        }
    else:
        doc.summary = {claim.claim: claim.verdict for claim in verdicts}
    if blown is not None:
        doc.summary["unnormalised_repeated_key_log10"] = float(blown.repeated[-1])
        doc.summary["unnormalised_random_keys_log10"] = float(blown.random[-1])
        if series:
            doc.summary["unnormalised_log10_by_step"] = _by_step(blown)
    if doc.fmt == "table":
        doc.text = probe_tables.tables(doc.command, rows, doc.summary)


def _judge(doc: Document, found: Sequence[Any], verdicts: Sequence[Any]) -> None:
    """Warn of states that are not finite; fail where a measurement contradicts itself or the closed form."""
    for m in found:
        if m.state is not None and m.state.nonfinite is not None:
            step, name = m.state.nonfinite
            doc.warn(f"{_name(m)}: {name} is not finite from step {step} on")
    wrong = [problem for m in found for problem in _problems(m)]
    wrong += [claim.verdict for claim in verdicts if claim.key == "vla_closed_form" and not claim.holds]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        doc.fail(f"{wrong[0]}{more}", hint="linattn verify-scan checks the recurrences themselves")


def _problems(m: Any) -> list[str]:
    if m.jacobians is None or m.flow is None:
        return []
    checks: Mapping[str, tuple[float, float]] = {
        "the Jacobian is off from the step it is of by": (m.jacobians.error, MATRIX_ERROR),
        "the residual of a Jacobian's norm or radius is": (m.jacobians.residual, KRYLOV_RESIDUAL),
        "the residual of the joint Jacobian's norm is": (m.penalty_residual, KRYLOV_RESIDUAL),
        "gradients by autograd and by products of Jacobians differ by": (m.flow.error, GRADIENT_ERROR),
    }
    return [f"{_name(m)}: {what} {got:.2g}" for what, (got, most) in checks.items() if not got <= most]


def _name(m: Any) -> str:
    layer = "" if m.subject.layer is None else f" layer {m.subject.layer}"
    return f"{m.subject.model}{layer} (seed {m.subject.seed})"
