"""One document to stdout, everything else to stderr, and the documented exit codes."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import warnings
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from linattn_cli import output
from linattn_cli.kernels.faults import FallbackWarning
from linattn_cli.output import CliError, Terminated, describe_error
from linattn_cli.progress import Progress
from linattn_cli.render import cell, column_names, jsonable, to_json
from linattn_cli.settings import RunConfig


def run(body, **options) -> int:
    """Run `body(doc)` as a command; its exit code."""
    try:
        with output.command("probe", **options) as doc:
            body(doc)
    except SystemExit as left:
        return left.code
    return 0


ROWS = [{"model": "vla", "loss": 0.123456789, "passed": True}, {"model": "a|b", "loss": math.nan, "extra": None}]


def fill(doc: output.Document) -> None:
    doc.results = ROWS
    doc.summary = {"accuracy": 0.99999}
    doc.note("saved in x")


def test_json_document_has_every_field_in_order(capsys):
    assert run(fill, json=True) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert list(document) == [
        "schema_version",
        "command",
        "status",
        "env",
        "config",
        "results",
        "summary",
        "error",
    ]
    assert document["schema_version"] == 1
    assert document["command"] == "probe"
    assert document["status"] == "ok"
    assert document["error"] is None
    assert document["results"][1] == {"model": "a|b", "loss": None, "loss_is_nan": True, "extra": None}
    assert document["summary"] == {"accuracy": 0.99999}
    assert err == "saved in x\n"


def test_table_when_piped(capsys):
    assert run(fill) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines() == [
        "model      loss  passed    extra",
        "-------  ------  --------  -------",
        "vla      0.1235  yes",
        "a|b         nan            -",
        "",
        "summary      value",
        "---------  -------",
        "accuracy   0.99999",
    ]


def test_a_piped_table_is_never_cut(capsys):
    word = "w" * 300

    def body(doc):
        doc.results = [{"a": word, "b": word, "c": 1}]

    run(body)
    out, _ = capsys.readouterr()
    assert f"{word}  {word}    1" in out


def test_csv_keeps_all_digits_and_only_rows(capsys):
    run(fill, fmt="csv")
    out, _ = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["loss"] for row in rows] == ["0.123456789", "nan"]
    assert [row["passed"] for row in rows] == ["true", ""]
    assert out.splitlines()[0] == "model,loss,passed,extra"


def test_csv_without_rows_is_the_summary(capsys):
    run(lambda doc: doc.summary.update(accuracy=0.5, note='say "x", y'), fmt="csv")
    assert capsys.readouterr().out == 'accuracy,note\n0.5,"say ""x"", y"\n'


def test_markdown_escapes_bars(capsys):
    run(fill, fmt="markdown")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].replace(" ", "") == "|model|loss|passed|extra|"
    assert set(lines[1]) <= set("|-: ")
    assert r"a\|b" in lines[3]


def test_columns_limit_the_table_alone(capsys):
    def body(doc):
        fill(doc)
        doc.columns = ["model", "absent"]

    run(body)
    assert capsys.readouterr().out.splitlines()[0] == "model"
    run(body, fmt="csv")
    assert capsys.readouterr().out.startswith("model,loss,passed,extra\n")


def test_text_replaces_the_table_alone(capsys):
    def body(doc):
        fill(doc)
        doc.text = "an example"

    run(body)
    assert capsys.readouterr().out == "an example\n"
    run(body, json=True)
    assert json.loads(capsys.readouterr().out)["results"][0]["model"] == "vla"


def test_quiet_silences_notes_and_log_but_not_errors(capsys):
    def body(doc):
        doc.log("working")
        doc.note("saved")
        doc.warn("careful")
        raise CliError("no", hint="yes")

    assert run(body, quiet=True) == 2
    assert capsys.readouterr().err == "warning: careful\nerror: no\nhint: yes\n"


@pytest.mark.parametrize(
    ("exception", "code", "kind"),
    [
        (CliError("x", exit_code=3, kind="device"), 3, "device"),
        (ValueError("T must be"), 2, "value"),
        (FileNotFoundError(errno.ENOENT, "No such file", "runs/a"), 2, "file"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), 2, "file"),
        (OSError(errno.EROFS, "Read-only file system", "runs/a"), 2, "file"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 4, "disk"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 4, "disk"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 4, "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 4, "memory"),
        (MemoryError(), 4, "memory"),
        (AssertionError("Torch not compiled with CUDA enabled"), 3, "device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(), 143, "terminated"),
        (RuntimeError("shape mismatch"), 70, "internal"),
        (AssertionError("x"), 70, "internal"),
        (OSError(errno.EIO, "Input/output error"), 70, "internal"),
    ],
)
def test_exit_codes(exception, code, kind):
    failure = describe_error(exception)
    assert (failure.exit_code, failure.kind) == (code, kind)
    assert "\n" not in failure.message
    assert failure.message


def test_the_paths_of_file_errors_are_named():
    failure = describe_error(PermissionError(errno.EACCES, "Permission denied", "/runs/a"))
    assert failure.message == "/runs/a: Permission denied"
    assert failure.hint


def test_an_error_is_one_line_on_stderr_and_in_the_document(capsys):
    def body(doc):
        doc.results.append({"a": 1})
        raise ValueError("beta must be\n  positive")

    assert run(body, json=True) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["status"] == "error"
    assert document["error"] == {"type": "value", "message": "beta must be positive", "hint": ""}
    assert document["results"] == [{"a": 1}]
    assert err == "error: beta must be positive\n"


def test_out_of_memory_names_the_setting_to_lower(capsys):
    def body(doc):
        doc.memory_hint = "lower --batch-size (now 64)"
        raise MemoryError

    assert run(body) == 4
    assert "hint: lower --batch-size (now 64)" in capsys.readouterr().err


def test_what_the_kernels_warn_of_is_a_line_also_when_quiet(capsys):
    def body(doc):
        warnings.warn("vla runs as impl='chunk': no room", FallbackWarning, stacklevel=1)
        warnings.warn("somebody else's", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="somebody else's") as others:
        assert run(body, quiet=True) == 0
    assert capsys.readouterr().err == "warning: vla runs as impl='chunk': no room\n"
    assert len(others) == 1


def test_a_failed_check_prints_its_rows_and_exits_1(capsys):
    def body(doc):
        doc.results.append({"passed": False})
        doc.fail("1 of 1 checks failed", hint="look")

    assert run(body) == 1
    out, err = capsys.readouterr()
    assert "no" in out
    assert err == "failed: 1 of 1 checks failed\nhint: look\n"
    run(body, json=True)
    assert json.loads(capsys.readouterr().out)["status"] == "failed"


def test_our_own_fault_saves_a_traceback_and_shows_none(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(lambda doc: {}["missing"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: internal fault: KeyError: 'missing'\nhint: the traceback is saved in ")
    assert "Traceback" not in err
    (saved,) = tmp_path.iterdir()
    assert "KeyError: 'missing'" in saved.read_text()
    assert str(saved) in err


def test_debug_shows_the_traceback_of_any_error(capsys):
    def body(doc):
        raise ValueError("x")

    assert run(body, debug=True) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_row_that_cannot_be_rendered_is_our_fault_and_still_a_document(capsys):
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert run(lambda doc: doc.results.append({"a": Broken()}), json=True) == 70
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "internal"


def test_formats_that_contradict_or_do_not_exist(capsys):
    assert run(fill, fmt="cvs") == 2
    assert "table, json, csv, markdown; got 'cvs' (did you mean 'csv'?)" in capsys.readouterr().err
    assert run(fill, fmt="csv", json=True) == 2
    assert "--json and --format csv contradict each other" in capsys.readouterr().err
    assert run(fill, fmt="json", json=True) == 0


def test_jsonable_of_everything_a_result_holds():
    class Kind(Enum):
        A = "a"

    value = {
        "array": np.array([1.0, np.nan]),
        "scalar": np.float32(0.5),
        "tensor": torch.tensor([[1, 2]]),
        "zero_dim": torch.tensor(float("inf")),
        "dtype": torch.float32,
        "path": Path("a/b"),
        "enum": Kind.A,
        "tuple": (1, -math.inf),
        "nested": {"x": math.nan},
        3: None,
        "config": RunConfig(),
    }
    plain = json.loads(to_json(value))
    assert plain["array"] == [1.0, None]
    assert plain["array_is_nan"] is True
    assert plain["scalar"] == 0.5
    assert plain["tensor"] == [[1, 2]]
    assert (plain["zero_dim"], plain["zero_dim_is_inf"]) == (None, True)
    assert plain["dtype"] == "torch.float32"
    assert (plain["path"], plain["enum"]) == ("a/b", "a")
    assert (plain["tuple"], plain["tuple_is_negative_inf"]) == ([1, None], True)
    assert plain["nested"] == {"x": None, "x_is_nan": True}
    assert "nested_is_nan" not in plain
    assert plain["3"] is None
    assert plain["config"]["model"]["name"] == "vla"


def test_cells_and_columns():
    assert cell(0.99999) == "0.99999"
    assert cell(1.0) == "1"
    assert cell(227.99996) == "228"
    assert cell(-12345.678) == "-12346"
    assert cell(1e-17) == "1e-17"
    assert cell({"a": 0.5}) == "a=0.5"
    assert cell(["x", 1]) == "x, 1"
    assert cell(jsonable(torch.tensor(2))) == "2"
    assert column_names([]) == []


def progress_lines(capsys, **options) -> list[str]:
    with Progress(10, "train", **options) as bar:
        for step in range(10):
            bar.update(loss=1 / (step + 1))
    return capsys.readouterr().err.splitlines()


def test_progress_is_a_plain_line_per_interval(capsys):
    lines = progress_lines(capsys, every=4)
    assert [line.split(",")[0] for line in lines] == ["train 4/10", "train 8/10", "train 10/10"]
    assert "loss 0.25" in lines[0]
    assert progress_lines(capsys, every=4, quiet=True) == []
    assert len(progress_lines(capsys)) == 1  # under ten seconds: the end alone


def test_progress_that_resumes_counts_from_where_it_was(capsys):
    with Progress(10, "train", every=5) as bar:
        bar.skip(4)
        bar.update()
        bar.log("a line")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("train 5/10")
    assert lines[1] == "a line"
