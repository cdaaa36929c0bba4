"""What every command prints, field by field: the one place where the published schemas are written down.

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


ENV: Fields = {
    "linattn": "string, version of linattn",
    "commit": "string|null?, commit of a source checkout, with +changes where files differ",
    "python": "string?, version",
    "torch": "string?, version",
    "triton": "string|null?, version; null where it is not installed",
    "numpy": "string|null?, version",
    "cuda": "string|null?, CUDA that torch was built for; null on a CPU",
    "platform": "string?, operating system",
    "device": "string?, torch's name of the device",
    "device_name": "string?, the device's own name",
    "cores": "integer?, cores this process may use",
    "threads": "integer?, threads torch computes with",
    "dtype": "string?, precision computed in",
    "impl": "string?, implementation that ran, joined by / where operators differ",
    "seed": "integer|null?, seed of weights and data",
}

ERROR: Fields = {
    "type": "string, kind of the error",
    "message": "string, what, got, expected, in one line",
    "hint": "string, how to fix it; may be empty",
}

ERROR_TYPES = (
    "usage",
    "value",
    "recipe",
    "file",
    "run_folder",
    "in_use",
    "checkpoint",
    "damaged_checkpoint",
    "newer_format",
    "code",
    "untrusted_code",
    "device",
    "probe",
    "workers",
    "ray",
    "memory",
    "disk",
    "check",
    "require",
    "non_finite",
    "interrupted",
    "terminated",
    "internal",
)

_ANSWERS: Fields = {
    "accuracy": "number, share of answers that are right",
    "loss": "number, mean cross entropy, natural log",
    "exact_sequence_accuracy": "number, share of sequences with every answer right",
    "answers": "integer, scored positions",
    "sequences": "integer, held-out sequences",
}

_CHANCE: Fields = {
    "chance_vocab": "number, accuracy of guessing in the vocabulary, 1/vocab_size",
    "chance_pairs": "number|null, accuracy of guessing among the values shown, 1/n_pairs; null where there are none",
}

_SIZE: Fields = {
    "n_pairs": "integer?, key-value pairs of mqar",
    "seq_len": "integer, tokens: of the input for mqar, to copy for copy",
    "updates": "integer?, keys of mqar that are assigned again",
}

METRICS: Fields = {
    "step": "integer, optimiser steps done",
    "loss": "number, mean cross entropy of the batch, natural log",
    "lr": "number, learning rate of the step",
    "grad_norm": "number, global norm of the gradient, before clipping",
    "accuracy": "number, share of the batch's answers that are right",
    "validation_accuracy": "number?, share of right answers on the validation stream",
    "validation_loss": "number?, mean cross entropy on the validation stream",
    "tokens_per_s": "number|null, training tokens a second since the last line",
    "elapsed_s": "number, seconds of training so far, over all sessions of the run",
}
"""A line of `metrics.jsonl`."""

TRAIN = Output(
    "One training run; the same document is result.json of the run folder.",
    summary={
        **_ANSWERS,
        **_CHANCE,
        "state_bytes": "integer|null, bytes of state a sequence; null where the layer carries none",
        "state_norm_max_*": "number?, largest Frobenius norm of that matrix of the state",
        "jacobian_norm_max": "number|null, largest spectral norm of dS_t/dS_{t-1}; null where it is not g I - a p^T",
        "jacobian": "string?, why there is no jacobian_norm_max",
        "parameters": "integer, trainable parameters",
        "fingerprint": "string, digest of the data",
        "tokens_per_s": "number|null, training tokens a second",
        "train_s": "number, seconds of training, over all sessions of the run",
        "steps": "integer, optimiser steps done",
        "stopped_by": "string, steps or target_accuracy",
        "run": "string, run folder",
    },
    config=RECIPE,
)

EVAL = Output(
    "A trained run on held-out data: a row a size, and a row a range of distances of each.",
    rows=(
        {
            **_SIZE,
            "step": "integer, checkpoint that was evaluated",
            "distance": "string, tokens back to what had to be recalled, as 8-15, or all",
            **_ANSWERS,
            **_CHANCE,
            "beyond_training": "boolean, whether sequences are longer than in training",
            "fingerprint": "string, digest of the data",
        },
    ),
    summary={
        "accuracy": "number, mean over the sizes",
        "accuracy_min": "number, lowest of the sizes",
        "step": "integer, checkpoint that was evaluated",
        "parameters": "integer, trainable parameters",
        "run": "string, run folder",
    },
    config=RECIPE,
)

_CHECKED: Fields = {
    "model": "string, mixer or primitive; with --published the formula",
    "options": "string, the mixer's options, or defaults; with --published where it is printed",
    "form": "string, what was checked",
    "against": "string|null, what it was checked against",
    "dtype": "string|null, precision of the inputs",
    "quantity": "string|null, output, state or gradient",
    "seq_len": "integer?, tokens",
    "d_head": "integer?, dimension of a head",
    "max_error": "number|null, largest error over max|reference|",
    "rms_ratio": "number|null, RMS of the error over RMS of the reference",
    "budget": "number|null, largest max_error allowed",
    "rms_budget": "number|null, largest rms_ratio allowed",
    "passed": "boolean|null, null where nothing is judged",
    "status": "string, passed, failed, not run; with --published the verdict on the printed formula",
    "reason": "string|null, why it failed or was not run",
    "worst": "integers, coordinates of the largest error",
    "got": "number|null, value at the worst coordinate",
    "expected": "number|null, value of the reference there",
    "condition": "number|null?, condition number of the penalty, where residuals are judged",
}

VERIFY_SCAN = Output(
    "Every form of every operator against its serial recurrence: a row a quantity.",
    rows=(_CHECKED,),
    summary={
        "checks": "integer, rows that were judged",
        "passed": "integer, of these the ones within budget",
        "failed": "integer, of all the ones beyond it",
        "not_run": "integer, rows that could not be judged here",
        "largest_share_of_budget": "number|null, the larger error of the worst row over its budget",
        "wall_s": "number, seconds",
    },
    config={
        "models": "strings, mixers and primitives",
        "forms": "strings, forms",
        "dtypes": "strings, precisions",
        "seq_len": "integer, tokens",
        "d_head": "integer, key dimension of a head",
        "value_dim": "integer, value dimension of a head",
        "batch": "integer, sequences",
        "heads": "integer, heads",
        "quick": "boolean, --quick",
        "defaults_only": "boolean, whether only the default options were checked",
        "inject": "string|null, the planted bug",
        "seed": "integer, seed of the inputs",
    },
)

LATENCY = Output(
    "Times of mixers: a row an arm and length, and in the summary where each overtakes softmax.",
    rows=(
        {
            "model": "string, mixer, primitive or peer",
            "impl": "string, implementation",
            "mode": "string, forward, train or decode",
            "seq_len": "integer, tokens",
            "latency_ms_p50": "number|null, median milliseconds of a call; of a token in decode",
            "latency_ms_p10": "number|null, 10 % quantile",
            "latency_ms_p90": "number|null, 90 % quantile",
            "tokens_per_s": "number|null, tokens a second at the median",
            "first_call_s": "number|null, seconds of the first call, compilation included",
            "peak_memory_mib": "number|null, most memory of a call beyond its inputs",
            "roofline_fraction": "number|null, time that this machine's roof allows over the median",
            "roofline_ms": "number|null, milliseconds that the roof allows",
            "bound": "string|null, memory or compute, whichever the roof is",
            "speedup_over_softmax": "number|null, softmax's median over this one",
            "speedup_over_reference": "number|null, median of the serial recurrence over this one",
            "repetitions": "integer, timed calls",
            "checked": "string|null, how much of the call was judged first: prefix, whole or decoded",
            "backend": "string|null, SDPA backend of softmax",
            "status": "string, ok, over budget, not run, check failed or out of memory",
            "reason": "string|null, why there is no time",
        },
    ),
    summary={
        "shape": "string, mode, batch, heads, d_head, dtype and device",
        "copy_bandwidth_gb_per_s": "number, measured",
        "matrix_tflop_per_s": "number, measured",
        "softmax_backends": "string|null, SDPA backends that were fastest",
        "crossover_*": "object?, tokens (null where there is none), status, what was measured, and a sentence",
    },
    config={
        "models": "strings, arms",
        "seq_lens": "integers, tokens",
        "mode": "string, forward, train or decode",
        "impl": "strings, implementations asked for",
        "batch": "integer, sequences",
        "heads": "integer, heads",
        "d_head": "integer, dimension of a head",
        "dtype": "string, precision",
        "repetitions": "integer, timed calls of a cell",
        "budget_s": "number, seconds of a cell",
        "gate": "boolean, whether results are checked first",
        "with_fla": "boolean, whether flash-linear-attention is timed too",
        "plot": "string|null, file of the plot",
    },
)

PROBE_NORM = Output(
    "Norms of states, Jacobians and gradients: a row a layer or operator, and in the summary a verdict a claim.",
    rows=(
        {
            "model": "string, mixer, with its settings",
            "source": "string, operator, model, or the run folder",
            "layer": "integer|null, number of the layer; null for a bare operator",
            "seed": "integer, seed of inputs and weights",
            "seq_len": "integer, tokens T",
            "heads": "integer, key heads",
            "d_head": "integer, key dimension of a head",
            "jacobian": "string, the tensors it is taken of, or why there is none",
            "jacobian_steps": "integer?, steps at which it was measured",
            "jacobian_norm_max": "number?, largest spectral norm, over steps, heads and sequences",
            "jacobian_norm_max_step": "integer?, where that was, counted from 1",
            "jacobian_norm_mean": "number?, mean of it",
            "spectral_radius_max": "number?, largest spectral radius",
            "spectral_radius_min": "number?, smallest",
            "cosine_min": "number|null?, smallest a.k where a step is I - a k^T of unit vectors",
            "cosine_mean": "number|null?, mean of it",
            "closed_form_error": "number|null?, how far (1 + sqrt(5 - 4 a.k)) / 2 is from the measured norm",
            "jacobian_error": "number?, how far it is from the step on random vectors, relative",
            "jacobian_residual": "number?, relative residual of the iterations; 0 where all values were computed",
            "joint_jacobian_norm_max": "number?, largest norm of the Jacobian of A and S together",
            "condition_A_max": "number?, largest cond(A)",
            "condition_A_last": "number?, cond(A) after the last token",
            "product_norm_*": "number?, largest norm of a product of so many Jacobians; log10: of all T, its logarithm",
            "gradient_norm_*": "number?, norm of d(output at T)/d(state so many tokens before its end)",
            "gradient_error": "number?, autograd against products of Jacobians, relative",
            "state_norm_*": "number?, Frobenius norm after T tokens, mean over heads; max_: the largest at any time",
            "growth_exponent_*": "number|null?, p of norm ~ t^p over the last decade; null where there is no trend",
            "nonfinite_step": "integer|null?, first step with a number that is not finite",
            "nonfinite_tensor": "string|null?, the tensor it is in",
            "series": "object?, what was found over time",
        },
    ),
    summary={
        "vla_*": "object?, a claim about VLA, whether it holds (null: not decided), the number and a sentence",
        "linear_unbounded": "object?, the same for the growth of linear attention's state",
        "unnormalised_repeated_key_log10": "number?, log10 of the product's norm after 25 steps, one raw key repeated",
        "unnormalised_random_keys_log10": "number?, the same for random raw keys, median",
        "unnormalised_log10_by_step": "object?, both by step",
    },
    config={
        "source": "string|strings, operator or model, or the run folders",
        "models": "strings, mixers",
        "options": "object, options of each",
        "seq_len": "integer|null, tokens; null for what the run was trained on",
        "d_head": "integer, dimension of a head",
        "heads": "integer, heads",
        "seeds": "integers, seeds",
        "step": "integer|null, checkpoint of the run; null for the last one",
        "dtype": "strings, precision of inputs and states",
        "impl": "string, implementation asked for",
        "plot": "string|null, file of the plot",
    },
)

TASK_SHOW = Output(
    "Examples of a task: a row a token.",
    rows=(
        {
            "example": "integer, number of the example",
            "position": "integer, position of the token",
            "token": "integer, the token",
            "role": "string, what the token is for",
            "label": "integer|null, what must be answered here",
            "distance": "integer|null, tokens back to what must be recalled",
        },
    ),
    summary={"input_len": "integer, tokens of an example", "fingerprint": "string, digest of the data", **_CHANCE},
    config={
        "task": "object, the task's resolved settings",
        "seed": "integer, seed of the data",
        "stream": "string, train, validation or test",
        "index": "integer, which batch of the stream",
        "count": "integer, examples",
    },
)

CAPACITY_SWEEP = Output(
    "A grid of training runs: a row a cell, and in the summary a row a group at its best learning rate.",
    rows=(
        {
            "model": "string, arm: a mixer, a mixer with options, or a variant of the recipe",
            "n_pairs": "integer|null, key-value pairs of mqar",
            "d_head": "integer, dimension of a head",
            "seq_len": "integer, tokens: of the input for mqar, to copy for copy",
            "lr": "number, peak learning rate",
            "seed": "integer, seed of weights and data",
            "accuracy": "number|null, share of held-out answers that are right; null unless finished",
            "key": "string, digest of everything that decides the cell",
            "status": "string, finished, diverged, failed or pending",
            "loss": "number|null, mean cross entropy on held-out data, natural log",
            "exact_sequence_accuracy": "number|null, share of held-out sequences with every answer right",
            "validation_accuracy": "number|null, share of right answers on the validation stream",
            "validation_loss": "number|null, mean cross entropy on the validation stream",
            "chance_vocab": "number|null, accuracy of guessing in the vocabulary",
            "chance_pairs": "number|null, accuracy of guessing among the values shown",
            "parameters": "integer|null, trainable parameters",
            "state_bytes": "integer|null, bytes of state a sequence",
            "steps": "integer|null, optimiser steps done",
            "stopped_by": "string|null, steps or target_accuracy",
            "train_s": "number|null, seconds of training",
            "wall_s": "number|null, seconds of the cell",
            "tokens_per_s": "number|null, training tokens a second",
            "device": "string|null, torch's name of the device",
            "device_name": "string|null, the device's own name",
            "impl": "string|null, implementation that ran",
            "fingerprint": "string|null, digest of the data",
            "attempts": "integer, how often it was tried",
            "error_type": "string|null, kind of the error",
            "error": "string|null, what went wrong",
            "run": "string|null, folder of its metrics",
            "finished_at": "string|null, date and time",
            "*": "any?, a further setting that varies over the grid",
        },
        {
            "model": "string, arm",
            "steps": "integer, optimiser steps at most",
            "tokens": "integer, training tokens at most",
            "*": "any?, place of the cell in the grid (--dry-run)",
        },
    ),
    summary={
        "cells": "integer, cells of the grid",
        "finished": "integer?, cells that reached their end",
        "diverged": "integer?, cells whose loss was not finite any more",
        "failed": "integer?, cells that raised",
        "pending": "integer?, cells not run yet",
        "train_s": "number?, seconds of training, over all cells",
        "steps": "integer, optimiser steps, done or with --dry-run at most",
        "sweep": "string?, folder",
        "table": "objects?, groups at their best learning rate, chosen on validation data",
        "table_at_lr": "objects?, groups at the recipe's own learning rate",
        "tokens": "integer?, training tokens at most (--dry-run)",
        "*": "any?, estimates of --dry-run",
    },
    config=RECIPE,
)

_NAMED: Fields = {
    "kind": "string, model, task or recipe",
    "name": "string, as given to options",
    "summary": "string, one sentence",
}

LIST = Output(
    "What there is: a row a model, task or recipe.",
    rows=(
        _NAMED,
        {
            **_NAMED,
            "recurrence": "string, the equations",
            "source": "string, paper",
            "impls": "strings, implementations",
            "options": "strings, options of its own",
        },
        {
            **_NAMED,
            "model": "string|null, mixer",
            "task": "string|null, task",
            "steps": "integer|null, optimiser steps",
        },
    ),
)

DOCTOR = Output(
    "What runs here: a row an operator and quantity.",
    rows=(
        {
            "operator": "string, primitive",
            "device": "string, torch's name of the device",
            "impl": "string, implementation",
            "dtype": "string, precision",
            "quantity": "string, output, state or gradient",
            "max_error": "number|null, largest error over max|reference|",
            "budget": "number|null, largest error allowed",
            "passed": "boolean, whether it is within",
            "problem": "string|null, what went wrong",
            "first_call_s": "number|null, seconds of the first call",
            "latency_ms": "number|null, milliseconds of a later call",
            "why_not_triton": "string|null, why Triton does not run here",
        },
    ),
    summary={
        "linattn": "string, version",
        "commit": "string|null, commit of a source checkout",
        "python": "string, version",
        "torch": "string, version",
        "torch_cuda": "string|null, CUDA that torch was built for",
        "triton": "string|null, version",
        "numpy": "string|null, version",
        "platform": "string, operating system",
        "cpu": "string, processor",
        "cores": "integer, cores this process may use",
        "threads": "integer, threads torch computes with",
        "memory_gib": "number|null, main memory",
        "gpus": "strings|null, GPUs",
        "gpu_memory_gib": "numbers|null, memory of each",
        "checks": "integer, checks made",
        "checks_passed": "integer, of these the ones that passed",
    },
)

SCHEMA = Output(
    "The commands that have a schema; with a COMMAND it prints that schema itself.",
    rows=(
        {"command": "string, command", "about": "string, what it prints"},
        {
            "part": "string, where the field stands: config, results, summary, env or error",
            "field": "string, its name; * stands for any words",
            "type": "string, JSON type; a number that is not finite is null with a flag beside it",
            "required": "boolean, whether it is always there",
            "meaning": "string, what it says, with units",
        },
    ),
)

COMPLETION = Output(
    "The completion script of a shell.",
    rows=({"shell": "string, bash, zsh or fish", "script": "string, what the shell is to read"},),
)

USAGE = Output("What no command answers for: a command line that names none.")

OUTPUTS: dict[str, Output] = {
    "linattn": USAGE,
    "train": TRAIN,
    "eval": EVAL,
    "verify-scan": VERIFY_SCAN,
    "latency": LATENCY,
    "probe-norm": PROBE_NORM,
    "capacity-sweep": CAPACITY_SWEEP,
    "task": USAGE,
    "task show": TASK_SHOW,
    "list": LIST,
    "doctor": DOCTOR,
    "schema": SCHEMA,
    "completion": COMPLETION,
}
