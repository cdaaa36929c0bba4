"""`--plot` of the commands, and `eval --show`: what is drawn and what is printed, from runs that really ran."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from linattn_cli import answers
from linattn_cli.app import main

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.ffn=16", "--batch-size", "4"),
    *("--set", "task.vocab_size=16", "--device", "cpu", "--set", "train.eval_examples=16", "--quiet"),
    *("--d-head", "8", "--n-pairs", "2"),
]


def call(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    found = capsys.readouterr()
    return int(left.value.code or 0), found.out, found.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    plot = folder / "run" / "curve.svg"
    with pytest.raises(SystemExit) as left:
        main(
            [
                "train",
                *TINY,
                "--steps",
                "6",
                "--set",
                "train.eval_every=2",
                "--out",
                f"{folder}/run",
                "--plot",
                f"{plot}",
            ]
        )
    assert not left.value.code
    return folder / "run"


def texts(path: Path) -> str:
    """The comments of an SVG whose text is shapes: matplotlib writes each text beside its shape."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))


def test_train_draws_into_the_folder_it_makes(trained):
    found = texts(trained / "curve.svg")
    for text in ("Loss", "Accuracy", "optimiser step", "cross entropy (nats)", "validation", "chance, 1/n_pairs"):
        assert text in found
    caption = " ".join(found.split("\n"))
    for text in ("lr 0.0003", "batch size 4", "seed 0", "d_head 8"):
        assert text in caption
    accuracy = json.loads((trained / "result.json").read_text())["summary"]["accuracy"]
    assert f"held-out, at the end: {accuracy:.4g}" in found


def test_a_run_that_leaves_the_finite_numbers_is_drawn_up_to_there(capsys, tmp_path):
    words = [*TINY, "--steps", "40", "--lr", "1e30", "--set", "train.warmup_steps=0", "--set", "train.log_every=1"]
    code, _, err = call(capsys, "train", *words, "--out", tmp_path / "run", "--plot", tmp_path / "x.png")
    assert code == 1
    assert "not finite" in err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["train", "eval", "verify-scan", "latency", "probe-norm", "capacity-sweep"])
def test_a_picture_that_cannot_be_saved_is_refused_before_any_work(capsys, trained, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    before = [trained] if command == "eval" else []
    for name, message in (("x.pdf", "--plot must end in .png or .svg"), ("/proc/x.svg", "cannot write /proc/x.svg")):
        code, out, err = call(capsys, command, *before, "--plot", name)
        assert code == 2
        assert out == ""
        assert message in err
        assert not err.startswith("linattn ")  # the first line of commands that compute
    assert list(tmp_path.iterdir()) == []


def test_eval_draws_accuracy_by_size_and_distance(capsys, trained, tmp_path):
    plot = tmp_path / "a b.svg"
    code, _, err = call(capsys, "eval", trained, "--n-pairs", "1,2,4", "--plot", plot)
    assert (code, f"plot saved in {plot}" in err) == (0, True)
    found = texts(plot)
    for text in (
        *("By key-value pairs", "By distance", "n_pairs 1", "n_pairs 4", "whole sequences", "chance, 1/n_pairs"),
        *("longer than in training", "tokens back to what had to be recalled", "size it was trained on"),
    ):
        assert text in found


def test_eval_of_one_size_and_of_lengths_is_drawn(capsys, trained, tmp_path):
    for words in ([], ["--seq-lens", "7,9,12"], ["--n-pairs", "1,2", "--seq-lens", "8,12"], ["--updates", "1"]):
        code, _, err = call(capsys, "eval", trained, *words, "--plot", tmp_path / "x.svg", "--quiet")
        assert code == 0, err
    assert "accuracy" in texts(tmp_path / "x.svg")


def test_verify_scan_draws_every_check_and_names_what_failed(capsys, tmp_path):
    words = ["verify-scan", "--models", "linear", "--quick", "--device", "cpu", "--quiet", "--plot", tmp_path / "x.svg"]
    code, _, _ = call(capsys, *words)
    found = texts(tmp_path / "x.svg")
    assert code == 0
    for text in ("float64", "float32", "chunk-split", "budget", "gradients", "all within budget"):
        assert text in found
    assert "beyond budget" not in found
    code, _, _ = call(capsys, *words, "--inject", "drop-last-token")
    found = texts(tmp_path / "x.svg")
    assert code == 1
    assert re.search(r"\d+ beyond budget", found)
    assert "planted bug drop-last-token" in " ".join(found.split("\n"))


def test_show_prints_the_sequences_that_were_counted(capsys, trained):
    code, out, _ = call(capsys, "eval", trained, "--examples", "5", "--show", "5", "--quiet", "--json")
    found = json.loads(out)
    examples = found["summary"]["examples"]
    assert code == 0
    assert len(examples) == 5
    answers_ = [answer for example in examples for answer in example["answers"]]
    whole = next(row for row in found["results"] if row["distance"] == "all")
    assert len(answers_) == whole["answers"]
    assert sum(answer["right"] for answer in answers_) / len(answers_) == whole["accuracy"]
    for example in examples:
        assert len(example["tokens"]) == len(example["roles"]) == example["seq_len"]
        assert example["right"] == sum(answer["right"] for answer in example["answers"])
        for answer in example["answers"]:
            assert answer["query"] == example["tokens"][answer["position"]]
            assert answer["right"] == (answer["expected"] == answer["answered"]) == (answer["slip"] is None)
            assert 0 < answer["probability_expected"] <= answer["probability"] <= 1


def test_show_in_words_for_people(capsys, trained):
    code, out, err = call(capsys, "eval", trained, "--show", "2", "--n-pairs", "2,4", "--quiet")
    assert code == 0, err
    assert len(re.findall(r"Example [12] \(n_pairs [24], seq_len \d+\): \d of \d+ right", out)) == 4
    assert "SEP" in out
    assert out.index("accuracy_min") < out.index("Example 1")
    assert not {"[", "\x1b"} & set(out[out.index("Example 1") :])  # right and wrong are words, not colours
    code, out, _ = call(capsys, "eval", trained, "--show", "1", "--quiet", "--format", "markdown")
    assert re.search(r"^Example 1 \(n_pairs 2.*:$", out, re.MULTILINE)
    code, out, err = call(capsys, "eval", trained, "--show", "1", "--quiet", "--format", "csv")
    assert (code, "Example" in out) == (0, False)
    assert "--show has no place in a CSV table" in err


def test_show_has_a_limit_and_no_default(capsys, trained):
    assert call(capsys, "eval", trained, "--show", "65")[0] == 2
    _, out, _ = call(capsys, "eval", trained, "--quiet", "--json")
    assert "examples" not in json.loads(out)["summary"]


def example(right: list[bool], **more):
    made = [
        {
            "position": 5 + n,
            "query": 1,
            "expected": 9,
            "answered": 9 if ok else 7,
            "right": ok,
            "distance": 4,
            "probability": 0.5,
            "probability_expected": 0.5 if ok else 0.125,
            "slip": None if ok else "the value of key 2",
        }
        for n, ok in enumerate(right)
    ]
    found = {"n_pairs": 2, "seq_len": 5 + len(right), "updates": 0, "example": 0, "right": sum(right), "answers": made}
    roles = ["key", "value", "key", "value", "separator", *["query"] * len(right)]
    return found | {"tokens": [1, 9, 2, 7, 15, *[1] * len(right)], "roles": roles} | more


def test_a_wrong_answer_is_marked_and_explained():
    lines = list(answers.lines(example([True, False])))
    assert lines[0] == "Example 1 (n_pairs 2, seq_len 7): 1 of 2 right"
    assert lines[1].split() == ["read", "1:9", "2:7", "SEP"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:7]}
    assert rows["expected"] == ["9", "9"]
    assert rows["answered"] == ["9", "7"]
    assert rows["ok"] == ["XX"]
    assert (
        lines[7].strip().startswith("XX at 6: answered 7, the value of key 2 (probability 0.5; 9, which is right, had")
    )


def test_many_answers_go_on_in_blocks_that_fit_a_line():
    lines = list(answers.lines(example([True] * 60 + [False] * 20)))
    assert max(map(len, lines[:-9])) <= answers.LINE + 2
    assert sum(line.strip().startswith("answered") for line in lines) >= 3
    assert lines[-1].strip() == "and 12 more wrong"


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (7, "the value of key 2"),
        (8, "the value of this key before it was assigned again"),
        (1, "the token that was asked"),
        (2, "a token of the sequence, but of another place"),
        (5, "not in the sequence"),
    ],
)
def test_slips_are_told_apart(token, said):
    pairs = [(1, 8), (2, 7), (1, 9)]
    records = [{"role": role, "token": t} for pair in pairs for role, t in zip(("key", "value"), pair, strict=True)]
    assert answers.slip(records, {"token": 1}, token) == said


def test_copying_is_shown_too(capsys, tmp_path):
    words = [*TINY[:-2], "--task", "copy", "--seq-len", "5", "--steps", "2", "--model", "linear"]
    assert call(capsys, "train", *words, "--out", tmp_path / "run")[0] == 0
    code, out, err = call(capsys, "eval", tmp_path / "run", "--show", "1", "--quiet", "--plot", tmp_path / "x.png")
    assert code == 0, err
    assert re.search(r"Example 1 \(seq_len 5\): \d of 5 right", out)


def test_latency_marks_the_crossover_and_names_the_lengths_asked_for(tmp_path):
    from linattn_cli import latency_plot, plotting

    def row(model, impl, tokens, ms):
        quantiles = {f"latency_ms_p{p}": ms for p in (10, 50, 90)}
        return {"model": model, "impl": impl, "seq_len": tokens, **quantiles}

    rows = [row("softmax", "sdpa", tokens, tokens / 100) for tokens in (256, 512, 600, 1024)]
    rows += [row("vla", "chunk", tokens, 6.0) for tokens in (256, 512, 600, 1024)]
    rows.append(row("linear", "chunk", 256, None))
    config = {"mode": "decode", "batch": 1, "heads": 2, "d_head": 8, "repetitions": 20, "seq_lens": [256, 512, 1024]}
    plotting.save(tmp_path / "x.svg", latency_plot.picture(config, {}, rows, {"vla chunk": 600, "linear chunk": None}))
    found = texts(tmp_path / "x.svg").split("\n")
    for text in ("256", "512", "1k", "where it meets softmax", "ms a token, median", "context (tokens)"):
        assert text in found
    assert found.count("600") == 1  # beside the star, and no tick
    assert not any("linear" in text for text in found)
