"""What a model answers, sequence by sequence: `linattn eval --show`.

The sequences are the first held-out ones, the same that `eval` counts, so what is shown and what is counted agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from linattn_cli.model import LanguageModel
    from linattn_cli.output import Document
    from linattn_cli.tasks.types import Task

Example = dict[str, Any]

LINE = 96
"""Characters of a line of answers; more answers go on in a further block."""

SLIPS = 8
"""Wrong answers of a sequence that are explained; the others are only marked."""

SEPARATOR = "SEP"


def examples(
    model: LanguageModel, task: Task, *, count: int, seed: int, device: torch.device, dtype: str
) -> list[Example]:
    """The first `count` held-out sequences of a task, each with the answer at every scored position.

    An answer has `position`, `query` (the token there), `expected`, `answered`, `right`, `distance`, the
    probabilities given to both, and where it is wrong what was answered instead (`slip`).
    """
    import torch

    from linattn_cli.evaluation import score

    batch = task.batch(count, seed=seed, stream="test", index=0)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            scored = score(model, batch, device=device, dtype=dtype)
    finally:
        model.train(was_training)
    probabilities = scored.logits.double().softmax(-1).cpu()
    answered = scored.logits.argmax(-1).cpu().tolist()
    found, number = [], 0
    size = {key: value for key, value in task.config().items() if key in ("n_pairs", "seq_len", "updates")}
    for row in range(count):
        records = task.explain(batch, row)
        answers = []
        for record in records:
            if record["label"] is None:
                continue
            token, label = answered[number], record["label"]
            answer = {
                "position": record["position"],
                "query": record["token"],
                "expected": label,
                "answered": token,
                "right": token == label,
                "distance": record["distance"],
                "probability": float(probabilities[number, token]),
                "probability_expected": float(probabilities[number, label]),
                "slip": None if token == label else slip(records, record, token),
            }
            answers.append(answer)
            number += 1
        right = sum(answer["right"] for answer in answers)
        tokens = [record["token"] for record in records]
        roles = [record["role"] for record in records]
        found.append({**size, "example": row, "right": right, "tokens": tokens, "roles": roles, "answers": answers})
    return found


def slip(records: Sequence[dict[str, Any]], asked: dict[str, Any], token: int) -> str:
    """What a wrong answer is, in the words of its sequence.

    >>> pairs = [{"role": "key", "token": 1}, {"role": "value", "token": 9}]
    >>> slip(pairs + [{"role": "key", "token": 2}, {"role": "value", "token": 7}], {"token": 1}, 7)
    'the value of key 2'
    """
    values: dict[int, list[int]] = {}
    for record, after in itertools.pairwise(records):
        if record["role"] == "key" and after["role"] == "value":
            values.setdefault(record["token"], []).append(after["token"])
    if token in values.get(asked["token"], [])[:-1]:
        return "the value of this key before it was assigned again"
    if token == asked["token"]:
        return "the token that was asked"
    owners = [key for key, found in values.items() if token in found]
    if owners:
        return f"the value of key {owners[0]}"
    if any(record["token"] == token for record in records):
        return "a token of the sequence, but of another place"
    return "not in the sequence"


def report(doc: Document, shown: Sequence[Example]) -> None:
    """Add the examples to a finished document, in the way its format has room for."""
    from linattn_cli.output import Document
    from linattn_cli.render import render

    if doc.fmt == "json":
        doc.summary["examples"] = list(shown)
    elif doc.fmt == "markdown":
        summary = [{"summary": key, "value": value} for key, value in doc.summary.items()]
        doc.tables = [("Held-out accuracy:", doc.results), ("Summary:", summary)]
        doc.tables += [(f"{_title(example)}:", list(_rows(example))) for example in shown]
    elif doc.fmt == "table":
        rows = render(Document(doc.command, results=doc.results, columns=doc.columns))
        summary_text = render(Document(doc.command, summary=doc.summary))
        doc.text = "\n".join([rows, summary_text, *("\n".join(lines(example)) + "\n" for example in shown)])
    else:
        doc.warn("--show has no place in a CSV table; take --format table or --json")


def lines(example: Example) -> Iterator[str]:
    """A sequence for people: what is read, then query, expected and answered below one another."""
    names = {token: SEPARATOR for token, role in zip(example["tokens"], example["roles"], strict=True) if _is_sep(role)}
    yield _title(example)
    yield from _wrapped("read", list(_read(example, names)))
    columns = [
        (
            str(answer["position"]),
            names.get(answer["query"], str(answer["query"])),
            names.get(answer["expected"], str(answer["expected"])),
            names.get(answer["answered"], str(answer["answered"])),
            "ok" if answer["right"] else "XX",
        )
        for answer in example["answers"]
    ]
    heads = ("position", "token", "expected", "answered", "")
    width = max(len(cell) for column in columns for cell in column) + 2
    a_line = max(1, (LINE - 11) // width)
    for start in range(0, len(columns), a_line):
        block = columns[start : start + a_line]
        for number, head in enumerate(heads):
            yield f"  {head:<9}" + "".join(f"{column[number]:>{width}}" for column in block)
    wrong = [answer for answer in example["answers"] if not answer["right"]]
    for answer in wrong[:SLIPS]:
        yield (
            f"  XX at {answer['position']}: answered {names.get(answer['answered'], answer['answered'])}, "
            f"{answer['slip']} (probability {answer['probability']:.2g}; {answer['expected']}, which is right, "
            f"had {answer['probability_expected']:.2g})"
        )
    if len(wrong) > SLIPS:
        yield f"  and {len(wrong) - SLIPS} more wrong"


def _is_sep(role: str) -> bool:
    return role == "separator"


def _title(example: Example) -> str:
    size = ", ".join(f"{key} {example[key]}" for key in ("n_pairs", "seq_len", "updates") if example.get(key))
    return f"Example {example['example'] + 1} ({size}): {example['right']} of {len(example['answers'])} right"


def _read(example: Example, names: dict[int, str]) -> Iterator[str]:
    """The part of a sequence that is read: pairs as key:value, no filler."""
    roles, tokens = example["roles"], example["tokens"]
    for place, (role, token) in enumerate(zip(roles, tokens, strict=True)):
        if role == "key":
            yield f"{token}:{tokens[place + 1]}"
        elif role in ("source", "separator"):
            yield names.get(token, str(token))
    filler = roles.count("filler")
    if filler:
        yield f"and {filler} tokens of filler"


def _wrapped(head: str, words: list[str]) -> Iterator[str]:
    import textwrap

    text = textwrap.wrap("  ".join(words), LINE - 11, break_on_hyphens=False) or [""]
    for number, line in enumerate(text):
        yield f"  {head if number == 0 else '':<9}{line:>{len(line) + 2}}"


def _rows(example: Example) -> Iterator[dict[str, Any]]:
    for answer in example["answers"]:
        yield {**answer, "right": "right" if answer["right"] else "WRONG"}
