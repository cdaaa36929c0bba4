"""`linattn latency`: rows that can be trusted, and never a time on a red check."""

from __future__ import annotations

import csv
import io
import json
import types
from dataclasses import replace

import pytest
import torch

from linattn_cli import latency, latency_bench, latency_peers, output
from linattn_cli.app import main
from linattn_cli.commands.latency import parse_lengths
from linattn_cli.kernels import dispatch
from linattn_cli.kernels.delta.chunk import delta_scan_chunk
from linattn_cli.kernels.registry import MIXERS, PRIMITIVES
from linattn_cli.latency_arms import arms
from linattn_cli.latency_cases import DECODED, PREFIX, Setting, draw, sdpa_arm
from linattn_cli.latency_gate import Gate
from linattn_cli.latency_timing import prepare

CPU = torch.device("cpu")
SMALL = ("--heads", "2", "--d-head", "16", "--device", "cpu", "-q")


def call(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["latency", *words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def document(capsys, *words: str, code: int = 0) -> dict:
    patience = () if "--budget-s" in words else ("--budget-s", "600")  # a busy machine must not fail these
    got, out, err = call(capsys, *words, *patience, *SMALL, "--json")
    assert got == code, err
    return json.loads(out)


def setting(mode: str = "forward", dtype: torch.dtype = torch.float64, **changes) -> Setting:
    return Setting(**{"batch": 1, "heads": 2, "d_head": 16, "dtype": dtype, "device": CPU, "mode": mode} | changes)


@pytest.fixture
def quick(monkeypatch):
    """The same numbers without the seconds: the roof of this machine is measured in a test of its own."""
    from linattn_cli.roofline import Roof

    monkeypatch.setattr(latency, "measure_roof", lambda device, dtype: Roof(1e10, 1e11))


@pytest.mark.parametrize("mode", ["forward", "train", "decode"])
def test_rows_are_complete_and_consistent(capsys, quick, mode):
    words = ("sweep", "--models", "deltanet,linear_scan", "--seq-lens", "64,130", "--mode", mode, "--dtype", "float64")
    result = document(capsys, *words)
    rows = result["results"]
    assert [(row["model"], row["impl"], row["seq_len"]) for row in rows] == [
        (model, impl, tokens)
        for tokens in (64, 130)
        for model, impl in (("softmax", "sdpa"), ("deltanet", "chunk"), ("linear_scan", "chunk"))
    ]
    for row in rows:
        assert (row["status"], row["mode"], row["repetitions"]) == ("ok", mode, 20)
        assert row["checked"] == ("decoded" if mode == "decode" else "prefix")
        assert 0 < row["latency_ms_p10"] <= row["latency_ms_p50"] <= row["latency_ms_p90"]
        made = 1 if mode == "decode" else row["seq_len"]
        assert row["tokens_per_s"] == pytest.approx(1000 * made / row["latency_ms_p50"])
        assert row["first_call_s"] > 0
        assert row["peak_memory_mib"] > 0
        assert row["roofline_fraction"] == pytest.approx(row["roofline_ms"] / row["latency_ms_p50"])
        softmax = next(r for r in rows if r["model"] == "softmax" and r["seq_len"] == row["seq_len"])
        assert row["speedup_over_softmax"] == pytest.approx(softmax["latency_ms_p50"] / row["latency_ms_p50"])
    assert rows[0]["backend"] in ("flash", "math")
    crossover = result["summary"]["crossover_deltanet_chunk"]
    assert (crossover["tokens"] is None) == crossover["status"].startswith(("slower", "faster"))
    assert result["config"]["models"] == ["softmax", "deltanet", "linear_scan"]


def test_every_model_runs_in_every_mode():
    for mode in ("forward", "train", "decode"):
        place = setting(mode)
        for arm in arms([*MIXERS, *PRIMITIVES], ["chunk"], place):
            tensors = draw(arm.names, place, 40 + DECODED)
            sample = prepare(arm, place, tensors, 40)
            sample.run()
            assert sample.output.isfinite().all(), (arm.key, mode)
            assert sample.output.shape[1] == (1 if mode == "decode" else 40 + DECODED)


def test_implementations_are_compared_with_the_sequential_form(capsys, quick):
    rows = document(capsys, "--models", "hla2", "--impl", "reference,scan,chunk,triton", "--seq-lens", "64")["results"]
    found = {row["impl"]: row for row in rows}
    assert set(found) == {"sdpa", "reference", "scan", "chunk", "triton"}
    assert found["reference"]["speedup_over_reference"] == 1
    assert found["reference"]["checked"] is None  # it is what the others are checked against
    speedup = found["reference"]["latency_ms_p50"] / found["chunk"]["latency_ms_p50"]
    assert found["chunk"]["speedup_over_reference"] == pytest.approx(speedup)
    assert (found["triton"]["status"], found["triton"]["latency_ms_p50"]) == ("not run", None)
    assert found["triton"]["reason"]
    assert found["sdpa"]["speedup_over_reference"] is None


def _bad_gradient(q, p, a, v, **options):
    """Right outputs, wrong gradient of v."""
    o, state, residual = delta_scan_chunk(q, p, a, v, **options)
    return o + 0.01 * (v - v.detach()), state, residual


def _bad_output(q, p, a, v, **options):
    o, state, residual = delta_scan_chunk(q, p, a, v, **options)
    return o * (1 + 1e-6), state, residual


def _bad_state(q, p, a, v, *, initial_state, **options):
    """Right from nothing, wrong from a carried state."""
    state = None if initial_state is None else initial_state * (1 + 1e-6)
    return delta_scan_chunk(q, p, a, v, initial_state=state, **options)


def _late_nan(q, p, a, v, **options):
    o, state, residual = delta_scan_chunk(q, p, a, v, **options)
    return torch.where(torch.arange(o.shape[1]).view(-1, 1, 1) > PREFIX, torch.nan, o), state, residual


def _drop_tail(q, p, a, v, **options):
    """The last token is lost, at every length: no prefix of a long call shows it."""
    o, state, residual = delta_scan_chunk(q, p, a, v, **options)
    return torch.cat((o[:, :-1], torch.zeros_like(o[:, -1:])), dim=1), state, residual


def _crash(*tensors, **options):
    raise RuntimeError("kernel exploded")


@pytest.mark.parametrize(
    ("mode", "bug", "said"),
    [
        ("forward", _bad_output, "o: max error"),
        ("train", _bad_gradient, "grad v: max error"),
        ("decode", _bad_state, "o: max error"),
        ("forward", _late_nan, "values not finite"),
        ("forward", _drop_tail, "in a call of 97 tokens, o: max error"),
        ("forward", _crash, "raised RuntimeError: kernel exploded"),
    ],
)
def test_a_red_check_has_no_time_and_exit_code_1(capsys, quick, mode, bug, said):
    words = ("--models", "linear,deltanet", "--seq-lens", "128", "--mode", mode, "--dtype", "float64")
    with dispatch.override("delta_scan", "chunk", bug):
        result = document(capsys, *words, code=1)
    softmax, linear, deltanet = result["results"]
    assert deltanet["status"] == "check failed"
    assert said in deltanet["reason"]
    timed = [key for key, value in deltanet.items() if value is not None and key.startswith(("lat", "first", "tok"))]
    assert timed == []
    assert softmax["status"] == linear["status"] == "ok"
    assert result["status"] == "failed"
    assert "deltanet by chunk at 128" in result["error"]["message"]


def test_without_the_gate_it_warns_and_times(capsys, quick):
    words = ("--models", "deltanet", "--seq-lens", "64", "--no-gate", "--json")
    with dispatch.override("delta_scan", "chunk", _bad_output):
        code, out, err = call(capsys, *words, *SMALL)
    row = json.loads(out)["results"][1]
    assert code == 0
    assert row["latency_ms_p50"] > 0
    assert row["checked"] is None
    assert "warning: --no-gate: nothing is checked" in err


def test_the_gate_judges_every_length_by_one_serial_run():
    place, calls = setting(), []
    arm = arms(["deltanet"], ["chunk"], place)[1]
    counted = replace(arm, oracle=lambda x, state: calls.append(1) or arm.oracle(x, state))
    gate = Gate(place)
    for tokens in (PREFIX, 150, 300):
        assert gate.check(counted, draw(arm.names, place, tokens), tokens) == (None, "prefix")
    assert len(calls) == 2  # float64, and the dtype that is timed


def test_a_kernel_is_judged_to_its_last_token_by_the_chunk_form():
    place = setting()
    chunk = arms(["deltanet"], ["chunk"], place)[1]
    kernel = replace(chunk, impl="triton")

    def lossy(x, state):
        o, state = chunk.call(x, state)
        return torch.cat((o[:, :-1], 0 * o[:, -1:]), dim=1) if o.shape[1] > PREFIX else o, state

    tensors = draw(chunk.names, place, 200)
    assert Gate(place).check(kernel, tensors, 200) == (None, "whole")
    problem, judged = Gate(place).check(replace(kernel, call=lossy), tensors, 200)
    assert judged == "whole"
    assert "against the chunk form in float64, worst at [0, 199," in problem


def test_the_first_tokens_are_the_same_at_every_length():
    place = setting(batch=2)
    names = ("q", "k_unit", "a", "beta", "log_decay", "u")
    short, long = draw(names, place, 70), draw(names, place, 260)
    for name in names:
        assert torch.equal(short[name], long[name][:, :70]), name
        assert long[name].is_contiguous()
    assert not torch.equal(long["q"][:, :PREFIX], long["q"][:, PREFIX : 2 * PREFIX])


def test_a_budget_marks_the_cell_and_counts_what_was_done(capsys, quick):
    words = ("--models", "vla", "--impl", "reference", "--seq-lens", "512,1024", "--budget-s", "0.01")
    first, second = (row for row in document(capsys, *words)["results"] if row["model"] == "vla")
    assert (first["status"], first["repetitions"]) == ("over budget", 1)
    assert first["reason"] == "1 of 20 repetitions in 0.01 s"
    assert first["latency_ms_p50"] > 10
    assert (second["status"], second["repetitions"], second["latency_ms_p50"]) == ("over budget", 0, None)
    assert "more than the 0.01 s of a cell" in second["reason"]


def test_softmax_decodes_from_a_cache_without_changing_it():
    place = setting("decode")
    arm = sdpa_arm()
    x = draw(arm.names, place, 50 + DECODED)
    sample = prepare(arm, place, x, 50)
    sample.run()
    first = sample.output.clone()
    sample.run()
    assert torch.equal(sample.output, first)
    full = arm.call({name: y[:, : 50 + DECODED] for name, y in x.items()}, None)[0]
    torch.testing.assert_close(first, full[:, -1:])


def test_a_crossover_is_bisected_with_measurements(capsys, quick, monkeypatch):
    """Against times made up as T for the mixer and T^2 / 200 for softmax."""

    def made_up(cells, device, *, repetitions, budget_s):
        for cell in cells:
            tokens = cell.sample.inputs[0].shape[1]
            cell.seconds = [(tokens * tokens / 200 if cell is cells[0] else tokens) * 1e-6] * repetitions

    monkeypatch.setattr(latency_bench, "repeat_in_turn", made_up)
    result = document(capsys, "--models", "linear", "--seq-lens", "64..512")
    found = result["summary"]["crossover_linear_chunk"]
    assert found["status"] == "confirmed"
    assert found["tokens"] == 200
    assert found["slower_at"] < 200 <= found["faster_at"] <= 1.1 * found["slower_at"]
    lengths = {point["seq_len"] for point in found["measured"]}
    assert {found["slower_at"], found["faster_at"]} <= lengths > {64, 128, 256, 512}
    assert len(result["results"]) == 8  # the sweep alone

    code, out, _ = call(capsys, "--models", "linear", "--seq-lens", "256,512", *SMALL)
    assert code == 0
    assert "none in range: faster than softmax from 256 tokens on" in out


def test_out_of_memory_is_a_row_and_only_everywhere_an_error(capsys, quick, monkeypatch):
    def no_memory(self, arm, row, tensors, tokens):
        if arm.model == "linear" or tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")
        return original(self, arm, row, tensors, tokens)

    original = latency_bench.Bench._start
    monkeypatch.setattr(latency_bench.Bench, "_start", no_memory)
    limit = 64
    rows = document(capsys, "--models", "linear", "--seq-lens", "64")["results"]
    assert [row["status"] for row in rows] == ["ok", "out of memory"]
    limit = 0
    result = document(capsys, "--models", "linear", "--seq-lens", "64", code=4)
    assert "lower --seq-lens" in result["error"]["hint"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_saved(capsys, quick, tmp_path, suffix):
    path = tmp_path / f"plot.{suffix}"
    code, _, err = call(capsys, "--models", "linear", "--seq-lens", "64,128", "--plot", str(path), *SMALL[:-1])
    assert code == 0
    assert f"plot saved in {path}" in err
    start = path.read_bytes()[:300]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in start or b"<?xml" in start


def test_formats_keep_to_stdout_and_csv_parses(capsys, quick):
    code, out, err = call(capsys, "--models", "linear", "--seq-lens", "64", *SMALL[:-1], "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["model"] for row in rows] == ["softmax", "linear"]
    assert float(rows[1]["latency_ms_p50"]) > 0
    assert err.startswith("linattn ")
    assert "checked first: outputs of 97 tokens" in err


def test_lengths_are_lists_or_doubling_ranges():
    assert parse_lengths("1k..128k") == [1024 * 2**i for i in range(8)]
    assert parse_lengths("1k,2k,4k") == parse_lengths("1024,2048,4096") == [1024, 2048, 4096]
    assert parse_lengths("100..500") == [100, 200, 400]
    assert parse_lengths("3k,256..512") == [256, 512, 3072]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("foo",), 2, "linattn latency takes no 'foo'"),
        (("--models", "vlaa"), 2, "there is no 'vlaa' (did you mean 'vla'?)"),
        (("--mode", "trian"), 2, "(did you mean 'train'?)"),
        (("--impl", "chunky"), 2, "(did you mean 'chunk'?)"),
        (("--seq-lens", "4k..1k"), 2, "'4k..1k' holds no length"),
        (("--seq-lens", "0"), 2, "'0' holds no length"),
        (("--seq-lens", "1k,,2k"), 2, "has an empty entry"),
        (("--seq-lens", "1k..4k,2048"), 2, "2048 is given twice"),
        (("--seq-lens", "1q"), 2, "'1q' is not a whole number"),
        (("--seq-lens", "1k..x"), 2, "'x' is not a whole number"),
        (("--budget-s", "0"), 2, "--budget-s must be a positive number"),
        (("--budget-s", "nan"), 2, "--budget-s must be a positive number"),
        (("--repetitions", "3"), 2, "--repetitions"),
        (("--d-head", "257"), 2, "--d-head"),
        (("--dtype", "float31"), 2, "(did you mean 'float32'?)"),
        (("--plot", "x.pdf"), 2, "--plot must end in .png or .svg"),
        (("--plot", "/no/such/folder/x.png"), 2, "there is no folder /no/such/folder"),
        (("--models", "linear_scan", "--impl", "scan"), 2, "linear_scan has no impl 'scan'"),
        (("--models", "vla", "--impl", "triton", "--device", "cpu"), 3, "nothing to time: vla by triton"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_is_timed(capsys, monkeypatch, words, code, said):
    monkeypatch.setattr(latency, "run", lambda plan, doc: pytest.fail("it began"))
    got, out, err = call(capsys, *words)
    assert (got, out) == (code, "")
    assert said in err
    assert err.count("error: ") == 1


def test_peers_that_are_not_there_are_one_clear_line(capsys, monkeypatch):
    monkeypatch.setattr(latency_peers.importlib.util, "find_spec", lambda name: None)
    code, out, err = call(capsys, "--with-fla", "--device", "cpu")
    assert (code, out) == (3, "")
    assert "--with-fla: flash-linear-attention is not installed" in err
    monkeypatch.setattr(latency_peers.importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    code, _, err = call(capsys, "--with-fla", "--device", "cpu")
    assert code == 3
    assert "need a GPU" in err


def test_an_interrupt_keeps_the_lengths_that_are_done(capsys, quick, monkeypatch):
    original = latency_bench.Bench.measure

    def measure(self, chosen, tokens, tick=lambda n: None):
        if tokens == 128:
            raise KeyboardInterrupt
        return original(self, chosen, tokens, tick)

    monkeypatch.setattr(latency_bench.Bench, "measure", measure)
    result = document(capsys, "--models", "linear", "--seq-lens", "64,128", code=130)
    assert result["status"] == "interrupted"
    assert [row["seq_len"] for row in result["results"]] == [64, 64]


def test_noise_is_told(capsys):
    doc = output.Document("latency")
    doc.results = [{"latency_ms_p10": 1.0, "latency_ms_p90": 4.0}, {"latency_ms_p10": None, "latency_ms_p90": None}]
    latency._warn_of_noise(doc)
    assert "the machine is busy" in capsys.readouterr().err
    doc.results[0]["latency_ms_p90"] = 1.1
    latency._warn_of_noise(doc)
    assert capsys.readouterr().err == ""
