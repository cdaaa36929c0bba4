"""What every command prints, field by field: the one place where the published schemas are written down.

`schema_types` says how to read it; what the measuring commands print is in `schema_measures`.
"""

from __future__ import annotations

from linattn_cli.schema_measures import CAPACITY_SWEEP, LATENCY, PROBE_NORM, VERIFY_SCAN
from linattn_cli.schema_types import RECIPE, Fields, Output

ENV: Fields = {
    "linattn": "string, version of linattn",
    "commit": "string|null?, commit of a source checkout, with +changes where files differ",
    "command_line": "string|null?, the command line, quoted for a shell; null where there was none",
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
        "examples": "objects?, with --show: sequences (tokens, roles) with what was answered where, and whether right",
    },
    config=RECIPE,
)

COMPARE = Output(
    "Runs side by side: a row a run.",
    rows=(
        {
            "run": "string, run folder",
            "status": "string, finished, running, unfinished, or that of its result.json",
            "model": "string, mixer",
            "task": "string, task",
            "accuracy": "number|null, share of held-out answers that are right; null before the end of the run",
            "loss": "number|null, mean cross entropy on held-out data, natural log",
            "exact_sequence_accuracy": "number|null, share of held-out sequences with every answer right",
            "validation_accuracy": "number|null, the last one on the validation stream",
            "chance_vocab": "number|null, accuracy of guessing in the vocabulary",
            "chance_pairs": "number|null, accuracy of guessing among the values shown",
            "parameters": "integer|null, trainable parameters",
            "state_bytes": "integer|null, bytes of state a sequence",
            "jacobian_norm_max": "number|null, largest spectral norm of dS_t/dS_{t-1}",
            "steps": "integer|null, optimiser steps done",
            "stopped_by": "string|null, steps or target_accuracy",
            "train_s": "number|null, seconds of training",
            "tokens_per_s": "number|null, training tokens a second",
            "fingerprint": "string|null, digest of the data",
            "device": "string|null, torch's name of the device",
            "device_name": "string|null, the device's own name",
            "threads": "integer|null, threads torch computed with",
            "dtype": "string|null, precision",
            "impl": "string|null, implementation that ran",
            "torch": "string|null, version",
            "linattn": "string|null, version",
            "commit": "string|null, commit of a source checkout",
            "*.*": "any?, a key of the recipe that differs between the runs, as train.lr",
            "seed": "integer?, where it differs between the runs",
        },
    ),
    summary={
        "runs": "integer, runs compared",
        "differing": "strings, keys of the recipes that are not the same in all runs",
        "same_data": "boolean|null, whether all answer the same data; null where a run is not finished",
        "same_machine": "boolean|null, whether their times compare; null where a run is not finished",
        "best_run": "string|null, run with the highest held-out accuracy",
        "best_accuracy": "number|null, and that accuracy",
    },
    config={"runs": "strings, run folders"},
)

REPORT = Output(
    "One page of runs, sweeps and saved documents: a row a source.",
    rows=(
        {
            "source": "string, folder or file",
            "kind": "string, training run, sweep, or the command that printed the document",
            "title": "string, its heading on the page",
            "status": "string, finished, running, unfinished, or that of the document",
            "panels": "integer, panels drawn",
            "tables": "integer, tables",
        },
    ),
    summary={
        "report": "string, file of the page",
        "sources": "integer, sources on it",
        "bytes": "integer, size of the file",
    },
    config={
        "sources": "strings, folders and files",
        "out": "string, file of the page",
        "title": "string, heading",
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
    "compare": COMPARE,
    "report": REPORT,
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
