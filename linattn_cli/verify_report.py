"""What `linattn verify-scan` runs and how it reports it: selection, the table, and the papers' own formulas."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn_cli import output
from linattn_cli.output import EXIT_DEVICE, CliError, Document
from linattn_cli.parsing import parse_names
from linattn_cli.verify_rows import COLUMNS, by_reason, describe, share, worst_rows

INTERPRETED_LENGTH, QUICK_LENGTH, FULL_LENGTH = 19, 37, 97
QUICK_HEAD, FULL_HEAD = 8, 20
"""Default T and K: T is prime and K no power of two where time allows, so that tails and masks are met."""

SHORT, LONG = 128, 1024
"""Lengths up to which a batch holds four sequences, and two; beyond, one, and only the default options."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
SHOWN_FAILURES = 10


@dataclass(frozen=True)
class Request:
    """The command line of `verify-scan`, not yet checked; None is the default."""

    models: str | None = None
    forms: str | None = None
    dtypes: str | None = None
    seq_len: int | None = None
    d_head: int | None = None
    seed: int = 0
    device: str = "auto"
    quick: bool = False
    inject: str | None = None
    published: bool = False
    interpret: bool = False
    plot: Path | None = None


def run(request: Request, doc: Document) -> None:
    """Check what was asked for, and fill the document: rows, summary, tables, and failure if there is one."""
    if request.plot is not None:
        from linattn_cli.plotting import check_plot_path

        check_plot_path(request.plot)
    if request.interpret:
        _interpret_triton()
    from contextlib import nullcontext

    import torch

    from linattn_cli import environment
    from linattn_cli.experiment import say_what_is_absent
    from linattn_cli.kernels import dispatch
    from linattn_cli.own_mixer import is_own
    from linattn_cli.recipe import nearest
    from linattn_cli.verify import verify_case
    from linattn_cli.verify_bugs import BUGS, planted
    from linattn_cli.verify_cases import Sizes
    from linattn_cli.verify_own import verify_layer

    if request.inject is not None and request.inject not in BUGS:
        raise CliError(
            f"--inject: there is no {request.inject!r}{nearest(request.inject, BUGS)}",
            hint=f"there are {', '.join(BUGS)}; one at a time",
        )
    models, forms, dtypes = _selection(request)
    left_out = request.forms is None and not request.interpret and dispatch.triton_interpreted()
    if left_out:
        forms = [form for form in forms if form.impl != "triton"]
    device = environment.resolve_device(request.device)
    tokens, head = _sizes(request)
    # The largest error of few numbers is a matter of luck: short sequences come in larger batches.
    batch = 1 if tokens > LONG or request.interpret else 4 if tokens <= SHORT else 2
    sizes = Sizes(tokens, head, head - head // 4, batch=batch)
    defaults_only = tokens > LONG or request.interpret
    doc.config = {
        "models": models,
        "forms": [form.name for form in forms],
        "dtypes": dtypes,
        "seq_len": tokens,
        "d_head": head,
        "value_dim": sizes.value_dim,
        "batch": sizes.batch,
        "heads": sizes.heads,
        "quick": request.quick,
        "defaults_only": defaults_only,
        "inject": request.inject,
        "seed": request.seed,
    }
    impl = environment.resolve_impl("auto", device)
    doc.begin(device=device, dtype=",".join(dtypes), impl=impl, seed=request.seed)
    if request.inject:
        doc.log(f"planted bug {request.inject}: {BUGS[request.inject]}, in every implementation but the serial one")
    if left_out:
        doc.log("TRITON_INTERPRET is set: its kernels are checked only with --interpret or --forms triton")
    started = time.monotonic()
    cases = _cases(models, quick=request.quick, defaults=defaults_only)
    rows: list[dict[str, Any]] = []
    bug_or_none = planted(request.inject) if request.inject else nullcontext()
    kinds = tuple(getattr(torch, name) for name in dtypes)
    owns = [name for name in models if is_own(name)]
    for name in owns:
        say_what_is_absent(name, doc)
    with bug_or_none, doc.progress(len(cases) + len(owns), "cases") as bar:
        for case in cases:
            rows += verify_case(case, tuple(forms), kinds, sizes, seed=request.seed, device=str(device))
            bar.update(1)
        for name in owns:
            rows += verify_layer(name, kinds, sizes, seed=request.seed, device=str(device))
            bar.update(1)
        if {"rls", "mesa"} <= set(models) and "chunk" in doc.config["forms"]:
            rows += _twins(sizes, request.seed)
    _report(doc, rows, list(published_rows(request.seed)) if request.published else [], time.monotonic() - started)
    if request.plot is not None:
        from linattn_cli import plotting
        from linattn_cli.verify_plot import picture

        plotting.save(request.plot, picture(doc.config, doc.env, rows))
        doc.note(f"plot saved in {request.plot}")
    if request.inject and not doc.summary["failed"]:
        doc.warn(f"the planted bug {request.inject} went unnoticed by the {doc.summary['checks']} checks selected")


def _interpret_triton() -> None:
    # Read when kernels are decorated, so it must be set before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    from linattn_cli.kernels import dispatch

    if not dispatch.triton_available():
        raise CliError(
            "--interpret needs triton, which is not installed",
            hint="pip install triton (Linux only), or leave --interpret out",
            exit_code=EXIT_DEVICE,
            kind="device",
        )


def _selection(request: Request) -> tuple[list[str], list[Any], list[str]]:
    from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
    from linattn_cli.verify_forms import FORMS

    models = parse_names(request.models or "all", [*PRIMITIVES, *MIXERS], "--models", own=True)
    impls = list(dict.fromkeys(form.impl for form in FORMS if form.impl != "reference"))
    known = list(dict.fromkeys([*impls, *(form.name for form in FORMS)]))
    wanted = parse_names(request.forms or "all", known, "--forms")
    forms = [form for form in FORMS if any(form.matches(word) for word in wanted)]
    default = ("float32",) if request.interpret else DTYPES[:2] if request.quick else DTYPES[:3]
    dtypes = parse_names(request.dtypes, DTYPES, "--dtypes") if request.dtypes else list(default)
    return models, forms, dtypes


def _sizes(request: Request) -> tuple[int, int]:
    from linattn_cli.kernels.registry import MAX_HEAD_DIM

    tokens = INTERPRETED_LENGTH if request.interpret else QUICK_LENGTH if request.quick else FULL_LENGTH
    head = request.d_head or (QUICK_HEAD if request.quick or request.interpret else FULL_HEAD)
    if head > MAX_HEAD_DIM:
        raise CliError(f"--d-head must be at most {MAX_HEAD_DIM}, got {head}", hint="no operator takes more")
    return request.seq_len or tokens, head


def _cases(models: list[str], *, quick: bool, defaults: bool) -> list[Any]:
    """The cases of the models; with `defaults` the first of each, for lengths at which one takes minutes."""
    from linattn_cli.kernels.registry import MIXERS
    from linattn_cli.own_mixer import is_own, load
    from linattn_cli.verify_cases import primitive_cases
    from linattn_cli.verify_mixers import mixer_cases

    cases = [case for case in primitive_cases() if case.model in models]
    proved = [name for name in models if name in MIXERS or (is_own(name) and load(name).has_oracle)]
    cases += mixer_cases(proved, quick=quick or defaults)
    return list({case.model: case for case in reversed(cases)}.values())[::-1] if defaults else cases


def _twins(sizes: Any, seed: int) -> list[dict[str, Any]]:
    """`rls` and `mesa` compute the same numbers, one through the delta scan, one through the linear scan."""
    import torch

    from linattn_cli.compare import budget, compare
    from linattn_cli.verify import judged, row_of
    from linattn_cli.verify_forms import CHUNK, draw, execute
    from linattn_cli.verify_mixers import mixer_cases

    rls, mesa = (mixer_cases([name], quick=True)[0] for name in ("rls", "mesa"))
    dtype = torch.float64
    inputs = draw(rls, dtype, sizes, seed, "cpu")
    got, expected = (
        execute(case, inputs, CHUNK, gradients=False, seed=seed, dtype=dtype).values["o"] for case in (rls, mesa)
    )
    comparison = compare(got, expected, dtype=dtype)
    row = row_of(rls, "chunk", "mesa chunk", dtype, "o", sizes)
    return [row | judged(comparison, budget(dtype, comparison, gradient=False)) | {"condition": None}]


def published_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Two rows a formula of the papers: as printed, which is expected to differ, and as computed here."""
    import torch

    from linattn_cli.compare import budget, compare
    from linattn_cli.kernels.forms.published import CLAIMS
    from linattn_cli.verify import judged
    from linattn_cli.verify_cases import normal, unit

    generator = torch.Generator().manual_seed(seed)
    for claim in CLAIMS:
        q, k, v = (normal(generator, 2, 13, 2, 4) for _ in range(3))
        if claim.name.startswith("vla proposition"):
            result = claim.compare(unit(q), unit(k))
        elif claim.decayed:
            decay = torch.full(q.shape[:3], 0.9, dtype=q.dtype).log()
            result = claim.compare(q, k, v, decay)
        else:
            result = claim.compare(q, k, v)
        truth = result.exact if result.truth is None else result.truth
        for form, tensor, judge in (
            ("as printed", result.published, result.exact),
            ("corrected", result.corrected, truth),
        ):
            comparison = compare(tensor, judge, dtype=torch.float64)
            found = judged(comparison, budget(torch.float64, comparison, gradient=False))
            exact = found.pop("passed")
            # A printed formula may differ, and is only reported; what is computed in its place may not.
            verdict = "exact" if exact else claim.verdict if form == "as printed" else "failed"
            yield {
                "model": claim.name,
                "options": claim.source,
                "form": form,
                "against": "exact",
                "dtype": "float64",
                "quantity": "o",
                **found,
                "passed": None if form == "as printed" else exact,
                "status": verdict,
                "reason": result.why if form == "as printed" else None,
            }


def _report(doc: Document, rows: list[dict[str, Any]], published: list[dict[str, Any]], wall_s: float) -> None:
    judged = [row for row in rows if row["status"] != "not run"]
    failed = [row for row in rows + published if row["passed"] is False]
    if not judged:
        reasons = "; ".join(dict.fromkeys(row["reason"] for row in rows))
        raise CliError(
            f"nothing could be checked: {reasons or 'no form fits the models'}",
            hint="leave --forms and --dtypes out, or add --interpret to run Triton's kernels on the CPU",
            exit_code=EXIT_DEVICE,
            kind="device",
        )
    doc.summary = {
        "checks": len(judged),
        "passed": sum(row["passed"] for row in judged),
        "failed": len(failed),
        "not_run": len(rows) - len(judged),
        "largest_share_of_budget": max((share(row) for row in judged), default=None),
        "wall_s": round(wall_s, 1),
    }
    worst = list(worst_rows(judged))
    if doc.fmt == "markdown":
        doc.results = worst + published
    else:
        doc.results = rows + published
    doc.text = _tables(worst, published, [row for row in rows if row["status"] == "not run"], doc)
    for row in failed[:SHOWN_FAILURES]:
        doc.log(f"FAILED {describe(row)}")
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        doc.fail(f"{describe(failed[0])}{more}", hint="--json lists every check, with its worst coordinate")


def _tables(
    worst: list[dict[str, Any]], published: list[dict[str, Any]], not_run: list[dict[str, Any]], doc: Document
) -> str:
    """The table format: the worst row of each group, then the papers' formulas, then what was not run."""
    from linattn_cli.render import render

    def table(rows: list[dict[str, Any]], columns: list[str] | None = None) -> str:
        return render(output.Document(doc.command, results=rows, columns=columns))

    parts = [table(worst, COLUMNS)]
    if published:
        parts.append(table(published, ["model", "options", "form", "max_error", "status", "reason"]))
    if not_run:
        parts.append(table(list(by_reason(not_run))))
    parts.append(render(output.Document(doc.command, summary=doc.summary)))
    return "\n".join(parts)
