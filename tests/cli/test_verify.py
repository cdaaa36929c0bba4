"""The checker: it passes what is right, fails on every planted bug and fault, and says where and by how much."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
import torch

from linattn_cli import brute_force
from linattn_cli import verify as verify_module
from linattn_cli.app import main
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.faults import DoesNotFit
from linattn_cli.kernels.monoids import stream
from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.kernels.types import PenaltyState
from linattn_cli.verify import verify
from linattn_cli.verify_bugs import BUGS, planted
from linattn_cli.verify_cases import Sizes, primitive_cases
from linattn_cli.verify_forms import CHUNK, FORMS, SERIAL, chunk_size_for
from linattn_cli.verify_mixers import mixer_cases, option_sets

SMALL = Sizes(29, 5, 4, batch=4)
COMPILED = tuple(form for form in FORMS if form.impl != "triton")  # its interpreter has tests of its own
COLUMNS = {"model", "form", "against", "dtype", "quantity", "max_error", "rms_ratio", "budget", "passed"}
DTYPES = (torch.float64, torch.float32)


def call(capsys, *words: str) -> tuple[int, dict, str]:
    """Exit code, JSON document and stderr of verify-scan on short sequences."""
    with pytest.raises(SystemExit) as left:
        main(["verify-scan", "--seq-len", "29", "--d-head", "5", "--json", *words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), json.loads(out) if out else {}, err


def cases(*models: str, quick: bool = True) -> list:
    primitives = [case for case in primitive_cases() if case.model in models]
    return primitives + mixer_cases([name for name in models if name in MIXERS], quick=quick)


def rows_of(*models: str, forms=COMPILED, dtypes=DTYPES, sizes=SMALL, seed=0) -> list[dict]:
    return list(verify(cases(*models), forms, dtypes, sizes, seed=seed, device="cpu"))


def failed(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["passed"] is False]


@pytest.mark.parametrize("model", [*PRIMITIVES, *MIXERS])
def test_every_operator_passes_in_every_form(model):
    rows = rows_of(model)
    assert failed(rows) == []
    assert all(set(row) >= COLUMNS for row in rows)
    seen = {row["form"] for row in rows}
    assert seen >= {form.name for form in COMPILED} - ({"serial"} if model in PRIMITIVES else set())
    judged = [row for row in rows if row["status"] == "passed"]
    assert {row["dtype"] for row in judged} == {"float64", "float32"}
    assert any(row["quantity"].startswith("state") for row in judged)
    assert any(row["quantity"].startswith("grad ") for row in judged)
    for row in rows:
        if row["status"] == "not run":
            assert row["reason"]
            assert row["passed"] is None


def test_where_float16_overflows_serially_nothing_is_judged():
    rows = rows_of("hla3", dtypes=(torch.float16,), forms=[CHUNK])
    overflown = [row for row in rows if row["status"] == "not run"]
    assert overflown
    assert all("65,504" in row["reason"] for row in overflown)
    assert any(row["passed"] for row in rows)


def test_bfloat16_has_its_own_budget_and_states_in_float32():
    rows = rows_of("linear_scan", "vla", dtypes=(torch.bfloat16,), forms=[CHUNK])
    assert failed(rows) == []
    assert all(row["budget"] >= 4 * torch.finfo(torch.bfloat16).eps for row in rows)


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_caught_in_primitives_and_scans(capsys, bug):
    code, document, err = call(
        capsys, "--inject", bug, "--models", "linear_scan,delta_scan,penalty_gain,gated_deltanet", "--dtypes", "float64"
    )
    assert code == 1
    assert document["status"] == "failed"
    caught = failed(document["results"])
    untouched = {"penalty_gain"} if bug == "drop-decay" else set()
    assert {row["model"] for row in caught} == {*PRIMITIVES, "gated_deltanet"} - untouched
    if bug != "drop-decay":  # there the decay is a factor inside the affine map, no field to drop
        assert any(row["model"] == "gated_deltanet" and row["form"].startswith("scan") for row in caught)
    assert not any(row["form"] == "serial" for row in caught)
    assert f"planted bug {bug}" in err
    assert "FAILED linear_scan" in err
    assert "worst at [" in err
    assert "expected" in err


def test_a_planted_bug_is_taken_out_again():
    before = [dispatch.load(operator, "chunk") for operator in PRIMITIVES]
    sweeps = stream.exclusive_scan, stream.inclusive_scan
    with planted("shift-mask"):
        assert dispatch.load("linear_scan", "chunk") is not before[0]
        assert stream.inclusive_scan is not sweeps[1]
    assert [dispatch.load(operator, "chunk") for operator in PRIMITIVES] == before
    assert (stream.exclusive_scan, stream.inclusive_scan) == sweeps


def test_drop_decay_is_caught_in_a_scan_that_carries_its_decay():
    with planted("drop-decay"):
        rows = rows_of("hla2", dtypes=DTYPES[:1])
    assert any(row["form"] == "scan-chunks" for row in failed(rows))


def test_a_bug_that_no_selected_check_can_see_is_said_to_be_unnoticed(capsys):
    code, _, err = call(capsys, "--inject", "drop-decay", "--models", "softmax")
    assert code == 0
    assert "the planted bug drop-decay went unnoticed" in err


def tampered(change):
    """The chunk form of the linear scan with its results changed."""
    right = dispatch.load("linear_scan", "chunk")
    return dispatch.override("linear_scan", "chunk", lambda *tensors, **options: change(*right(*tensors, **options)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o, state: (o[:, :-1], state), "shape "),
        (lambda o, state: (o.to(torch.float16), state), "dtype float16"),
        (lambda o, state: (o, state.to(torch.bfloat16)), "dtype bfloat16"),
        (lambda o, state: (o / 0, state), "not finite"),
        (lambda o, state: o.no_such_thing, "raised AttributeError"),
        (lambda o, state: torch.ones(2) + torch.ones(3), "raised RuntimeError"),
    ],
)
def test_other_faults_are_failures_with_their_reason(change, reason):
    with tampered(change):
        bad = failed(rows_of("linear_scan", forms=[CHUNK]))
    assert any(reason in (row["reason"] or "") for row in bad)


def test_the_checker_sees_an_error_just_above_its_budget_and_none_just_below():
    for factor, expected in ((1 + 1e-10, 0), (1 + 1e-7, 1)):
        with tampered(lambda o, state, factor=factor: (o * factor, state)):
            rows = rows_of("linear_scan", forms=[CHUNK], dtypes=DTYPES[:1])
        assert bool(failed(rows)) == bool(expected)


def test_one_wrong_token_of_one_head_is_found_at_its_place():
    def change(o, state):
        o = o.clone()
        o[0, 17, 1] = -o[0, 17, 1]
        return o, state

    with tampered(change):
        bad = failed(rows_of("linear_scan", forms=[CHUNK], dtypes=DTYPES[:1]))
    outputs = [row for row in bad if row["quantity"] == "o"]
    assert outputs
    assert all(row["worst"][:3] == [0, 17, 1] for row in outputs)
    assert all(row["got"] == pytest.approx(-row["expected"]) for row in outputs)


def test_a_wrong_gradient_alone_is_found():
    def change(o, state):
        return o + (o - o.detach()) * 1e-4, state

    with tampered(change):
        bad = failed(rows_of("linear_scan", forms=[CHUNK], dtypes=DTYPES[:1]))
    assert bad
    assert all(row["quantity"].startswith("grad ") for row in bad)


def test_the_serial_oracle_is_itself_checked(monkeypatch):
    monkeypatch.setitem(brute_force.SUMS, "linear", lambda q, k, v, **_: 1.001 * brute_force.linear(q, k, v))
    rows = rows_of("linear", forms=[SERIAL])
    assert {row["against"] for row in rows} == {"brute force"}
    assert failed(rows)


def test_an_ill_conditioned_penalty_is_judged_by_its_residual_in_low_precision_only():
    rows = rows_of("penalty_gain", forms=[CHUNK], sizes=Sizes(97, 16, 12))
    repeated = [row for row in rows if "repeated" in row["options"]]
    assert all(row["condition"] > 1e4 for row in repeated)
    assert {row["quantity"] for row in repeated if row["dtype"] == "float32"} == {
        "x residual",
        "state.inverse residual",
        "state.mass",
    }
    assert {row["quantity"] for row in repeated if row["dtype"] == "float64"} == {"x", "state.mass", "state.inverse"}

    right = dispatch.load("penalty_gain", "chunk")

    def wrong(*tensors, **options):
        x, state = right(*tensors, **options)
        return -x, PenaltyState(state.mass, state.inverse, state.age)

    with dispatch.override("penalty_gain", "chunk", wrong):
        bad = failed(rows_of("penalty_gain", forms=[CHUNK], sizes=Sizes(97, 16, 12)))
    assert any(row["quantity"] == "x residual" for row in bad)


def test_beyond_2048_tokens_the_chunk_form_judges_and_is_itself_judged():
    case = cases("linear_scan")[:1]
    rows = list(verify(case, COMPILED, DTYPES, Sizes(2060, 3, 2, batch=1, heads=1), seed=0, device="cpu"))
    assert failed(rows) == []
    found = {(row["form"], row["against"], row["seq_len"]) for row in rows if row["status"] == "passed"}
    assert ("chunk", "serial float64", 2048) in found
    assert ("chunk-decode", "chunk float64", 2060) in found


@pytest.mark.parametrize(("relative_error", "wrong"), [(0.0, False), (3e-5, True)])
def test_a_long_sequence_in_doubt_is_judged_by_the_whole_recurrence(monkeypatch, relative_error, wrong):
    runs = []

    def execute(case, inputs, form, **options):
        if form is SERIAL:
            runs.append(inputs["v"].shape[1])
        return verify_module.execute_original(case, inputs, form, **options)

    right = dispatch.load("linear_scan", "chunk")

    def off(*tensors, **options):
        o, state = right(*tensors, **options)
        return o * (1 + relative_error * (o.dtype == torch.float32)), state

    monkeypatch.setattr(verify_module, "LONGEST_SERIAL", 16)
    monkeypatch.setattr(verify_module, "execute_original", verify_module.execute, raising=False)
    monkeypatch.setattr(verify_module, "execute", execute)
    with dispatch.override("linear_scan", "chunk", off):
        sizes = Sizes(200, 5, 4, batch=1, heads=1)
        rows = list(verify(cases("linear_scan")[:1], [CHUNK], (torch.float32,), sizes, seed=0, device="cpu"))
    assert bool(failed(rows)) is wrong
    assert runs.count(200) == (1 if wrong else 0)


def test_inputs_depend_on_the_seed_and_rows_repeat():
    one, again, other = (rows_of("linear_scan", forms=[CHUNK], seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert [row["expected"] for row in one] != [row["expected"] for row in other]


@pytest.mark.parametrize("tokens", [1, 2, 15, 24, 48, 97, 128, 512, 1024, 4096])
def test_chunks_leave_a_tail(tokens):
    size = chunk_size_for(tokens)
    assert tokens < size or tokens % size


@pytest.mark.parametrize("name", MIXERS)
def test_every_value_of_every_option_is_checked(name):
    sets = option_sets(MIXERS[name], quick=True)
    for option, described in MIXERS[name].options.items():
        values = described.choices or ((True, False) if isinstance(described.default, bool) else ())
        for value in values:
            assert any(options.get(option, described.default) == value for options in sets), (option, value)


def test_what_a_form_cannot_do_is_listed_with_the_reason():
    sizes = Sizes(19, 20, 6, batch=1, heads=1)
    rows = list(verify(cases("hla3", "softmax"), COMPILED, DTYPES[:1], sizes, seed=0, device="cpu"))
    published = [row for row in rows if row["options"] == "variant published" and row["form"] == "scan-chunks"]
    assert [row["reason"] for row in published if row["status"] == "not run"] == [
        "its dense maps hold K^3 V numbers a segment, for checking up to K = 16, not at K = 20"
    ]
    assert {row["d_head"] for row in published if row["passed"]} == {6}
    reasons = {row["reason"] for row in rows if row["model"] == "softmax" and row["status"] == "not run"}
    assert "softmax has no associative scan" in reasons


def test_triton_has_a_row_where_it_cannot_run_and_none_is_hidden_by_an_interpreter(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    rows = rows_of("linear_scan", forms=[form for form in FORMS if form.impl == "triton"], dtypes=DTYPES[:1])
    assert {row["status"] for row in rows} == {"not run"}
    assert all("cpu, not on a GPU" in row["reason"] or "not installed" in row["reason"] for row in rows)
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: True)
    code, document, err = call(capsys, "--models", "linear_scan", "--dtypes", "float64", "--device", "cpu")
    assert code == 0
    assert not any(row["form"].startswith("triton") for row in document["results"])
    assert "checked only with --interpret" in err


def test_triton_on_a_gpu_is_checked_in_the_dtypes_that_it_has(monkeypatch):
    """float64 is among the dtypes that are checked by default, and no kernel has it."""
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "why_not_triton", lambda operator, tensor: dispatch.why_not_dtype(tensor.dtype))
    triton = [form for form in FORMS if form.impl == "triton"]
    with dispatch.override("linear_scan", "triton", dispatch.load("linear_scan", "chunk")):
        rows = rows_of("linear_scan", forms=[CHUNK, *triton])
    of_triton = [row for row in rows if row["form"] != "chunk"]
    assert {row["form"] for row in of_triton if row["passed"]} == {form.name for form in triton}
    assert {(row["dtype"], row["reason"]) for row in of_triton if not row["passed"]} == {
        ("float64", "its kernels have no float64")
    }
    assert {row["dtype"] for row in of_triton if row["passed"]} == {"float32"}


def test_kernels_too_large_for_the_gpu_are_not_run_and_not_wrong(monkeypatch):
    def too_large(*_, **__):
        raise DoesNotFit("a kernel needs 131,072 bytes of shared memory and the GPU has 101,376")

    monkeypatch.setattr(dispatch, "why_not_triton", lambda operator, tensor: None)
    triton = [form for form in FORMS if form.impl == "triton"]
    with dispatch.override("linear_scan", "triton", too_large):
        rows = rows_of("linear_scan", forms=[CHUNK, *triton], dtypes=DTYPES[1:])
    reasons = {row["form"]: row["reason"] for row in rows if row["status"] == "not run"}
    assert set(reasons) == {form.name for form in triton}
    assert all(reason.startswith("a kernel needs 131,072 bytes") for reason in reasons.values())
    assert {row["status"] for row in rows if row["form"] == "chunk"} == {"passed"}


def test_decoding_in_chunks_of_one_token_rounds_as_the_serial_recurrence_does():
    """As maps of the whole state, as longer chunks are, single tokens err twice as much."""
    forms = [form for form in FORMS if form.name == "chunk-decode"]
    for row in rows_of("deltanet", "delta_scan", forms=forms, dtypes=DTYPES[1:], sizes=Sizes(97, 20, 16, batch=4)):
        assert row["max_error"] < 0.6 * row["budget"]
        assert row["rms_ratio"] < 0.6 * row["rms_budget"]


def test_rls_and_mesa_are_compared_with_each_other(capsys):
    code, document, _ = call(capsys, "--models", "rls,mesa", "--forms", "chunk", "--dtypes", "float64")
    assert code == 0
    (row,) = [row for row in document["results"] if row["against"] == "mesa chunk"]
    assert row["max_error"] < 1e-9


def test_the_published_formulas_differ_and_do_not_fail(capsys):
    code, document, _ = call(
        capsys, "--published", "--models", "linear_scan", "--forms", "chunk", "--dtypes", "float64"
    )
    assert code == 0
    printed = {row["model"]: row for row in document["results"] if row["form"] == "as printed"}
    assert {name: row["status"] for name, row in printed.items()} == {
        "hla2 decayed serial": "differs",
        "hla2 decayed operator": "not associative",
        "ahla decayed operator": "differs",
        "hla3 theorem 7.1": "differs",
        "vla proposition 2": "differs",
    }
    assert all(row["max_error"] > 1e-3 and row["reason"] for row in printed.values())
    corrected = [row for row in document["results"] if row["form"] == "corrected"]
    assert {row["model"] for row in corrected} == set(printed)
    assert all(row["status"] == "exact" and row["max_error"] < 1e-9 for row in corrected)


def test_the_document_counts_what_it_lists(capsys):
    code, document, err = call(capsys, "--models", "linear_scan,softmax", "--dtypes", "float32")
    assert code == 0
    summary, rows = document["summary"], document["results"]
    assert summary["checks"] == summary["passed"] == sum(row["status"] == "passed" for row in rows)
    assert summary["not_run"] == sum(row["status"] == "not run" for row in rows)
    assert 0 < summary["largest_share_of_budget"] < 1
    assert document["config"]["models"] == ["linear_scan", "softmax"]
    assert err.startswith("linattn ")


@pytest.mark.parametrize("fmt", ["table", "csv", "markdown"])
def test_every_format_names_models_and_verdicts(capsys, fmt):
    words = ["--models", "linear_scan,hla2", "--forms", "chunk,scan", "--dtypes", "float64", "--published"]
    with pytest.raises(SystemExit) as left:
        main(["verify-scan", "--seq-len", "19", "--d-head", "4", "--format", fmt, *words])
    out, _ = capsys.readouterr()
    assert not left.value.code
    for word in ("linear_scan", "chunk-split", "hla3 theorem 7.1", "differs", "exact"):
        assert word in out
    if fmt == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert {row["status"] for row in rows} >= {"passed", "not run", "differs", "exact"}
    if fmt == "table":
        assert "not run" in out
        assert "largest_share_of_budget" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--models", "vlaa"), 2, "--models: there is no 'vlaa' (did you mean 'vla'?)"),
        (("--forms", "chunks"), 2, "--forms: there is no 'chunks' (did you mean 'chunk'?)"),
        (("--dtype", "float8"), 2, "--dtypes: there is no 'float8'"),
        (("--inject", "shift-masks"), 2, "--inject: there is no 'shift-masks' (did you mean 'shift-mask'?)"),
        (("--inject", "all"), 2, "--inject: there is no 'all'"),
        (("--d-head", "300"), 2, "--d-head must be at most 256, got 300"),
        (("--forms", "scan", "--models", "linear_scan"), 3, "nothing could be checked: a primitive has no scan"),
    ],
)
def test_wrong_usage(capsys, words, code, said):
    got, document, err = call(capsys, *words)
    assert got == code
    assert said in err.splitlines()[-2] + err.splitlines()[-1]
    assert document["error"]["message"]


def test_as_a_process_piped_into_a_json_reader():
    command = [sys.executable, "-m", "linattn_cli", "verify-scan", "--quick", "--models", "linear_scan", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    parsed = subprocess.run(
        [sys.executable, "-m", "json.tool"], input=done.stdout, capture_output=True, text=True, check=True
    )
    assert json.loads(parsed.stdout)["status"] == "ok"
