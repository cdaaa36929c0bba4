"""`linattn report`: one page of runs, sweeps and documents, looked at in a real browser."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import headless
import pytest

from linattn_cli import reproduce
from linattn_cli.app import main
from linattn_cli.report_html import page
from linattn_cli.report_sections import LINES, Section, Table, _metrics

TINY = [
    *("--set", "model.d_model=16", "--set", "model.heads=2", "--set", "model.ffn=16", "--batch-size", "4"),
    *("--set", "task.vocab_size=16", "--device", "cpu", "--set", "train.eval_examples=16", "--quiet"),
]
TRAIN = [*TINY, "--d-head", "8", "--n-pairs", "2", "--steps", "3"]
FAST = ["--seq-lens", "8,16", "--d-head", "8", "--heads", "1", "--device", "cpu", "--budget-s", "0.05", "--quiet"]
PROBE = ["--models", "vla,linear,softmax", "--d-head", "4", "--heads", "1", "--seq-len", "16", "--device", "cpu"]
SWEEP = [*TINY, "--d-heads", "8", "--steps", "2", "--workers", "1", "--models", "linear,vla:penalty=none"]

NASTY = "a <b>&\"' run</title><script>alert(1)</script>"


def call(capsys, *words) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    found = capsys.readouterr()
    return int(left.value.code or 0), found.out, found.err


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Real runs, a sweep and documents, one of them in a folder whose name is an attack."""
    folder = tmp_path_factory.mktemp("sources")
    found = {"run": folder / NASTY.replace("/", "_"), "other": folder / "other", "sweep": folder / "sweep"}

    def run(*words, code=0) -> None:
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        assert (left.value.code or 0) == code, words

    run("train", *TRAIN, "--out", found["run"], "--set", "train.eval_every=1")
    run("train", *TRAIN, "--model", "linear", "--out", found["other"])
    run("capacity-sweep", *SWEEP, "--n-pairs", "1,2", "--lrs", "1e-3,1e-2", "--out", found["sweep"])
    documents = {
        "eval": ["eval", found["run"], "--n-pairs", "1,2", "--show", "1", "--quiet"],
        "latency": ["latency", "--models", "linear", "--impl", "chunk,reference", *FAST],
        "verify-scan": ["verify-scan", "--models", "linear", "--quick", "--published", "--device", "cpu", "--quiet"],
        "probe-norm": ["probe-norm", *PROBE, "--no-normalise-gate", "--quiet"],
        "list": ["list"],
    }
    for name, words in documents.items():
        found[name] = folder / f"{name}.json"
        with pytest.MonkeyPatch.context() as patch, open(found[name], "w", encoding="utf-8") as file:
            patch.setattr(sys, "stdout", file)
            run(*words, "--json")
    return found


class Parsed(html.parser.HTMLParser):
    """Tags that are open at the end, references to anything, headings and code."""

    VOID = ("meta", "link", "br", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: dict[str, list[str]] = {"h2": [], "code": [], "td": [], "title": []}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for key, value in attrs if key in ("href", "src", "xlink:href", "action", "data")]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.words:
            self.words[self.open[-1]].append(data)


def report(capsys, sources, tmp_path, *names) -> str:
    code, _, err = call(capsys, "report", *(sources[name] for name in names), "-o", tmp_path / "r.html")
    assert code == 0, err
    return (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_page_of_everything(capsys, sources, tmp_path):
    names = ["run", "other", "sweep", "eval", "latency", "verify-scan", "probe-norm", "list"]
    out = tmp_path / "r.html"
    code, text, err = call(capsys, "report", *(sources[n] for n in names), "-o", out, "--title", NASTY, "--json")
    assert code == 0, err
    found = json.loads(text)
    assert [row["kind"] for row in found["results"]] == ["training run"] * 2 + names[2:]
    assert [row["panels"] for row in found["results"]] == [2, 2, 2, 2, 1, 2, 4, 0]
    assert all(row["tables"] for row in found["results"])
    assert found["summary"] == {"report": str(out), "sources": 8, "bytes": out.stat().st_size}
    page_ = Parsed(out.read_text(encoding="utf-8"))
    assert page_.open == []
    assert len(page_.words["h2"]) == 9
    assert page_.words["h2"][0] == "Runs side by side"
    assert "script" not in page_.tags
    assert "".join(page_.words["title"]).startswith(NASTY)
    assert page_.tags.count("svg") == 2 + 2 + 2 + 2 + 2 + 1 + 2 + 4
    assert len(page_.ids) == len(set(page_.ids))
    # Nothing is named that does not lie in the page itself.
    assert {reference for reference in page_.references if not reference.startswith("#")} == {"data:,"}
    assert {reference[1:] for reference in page_.references if reference.startswith("#")} <= set(page_.ids)


def test_the_figures_are_those_of_the_run(capsys, sources, tmp_path):
    text = report(capsys, sources, tmp_path, "other")
    summary = json.loads((sources["other"] / "result.json").read_text())["summary"]
    for key in ("fingerprint", "parameters", "state_bytes"):
        assert f"<td>{summary[key]}</td>" in text
    assert "Runs side by side" not in text
    assert "d_model: 16" in text  # the recipe
    assert "device_name" in text


def test_the_commands_on_the_page_do_it_again(capsys, sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = report(capsys, sources, tmp_path, "run", "sweep", "eval", "latency", "verify-scan", "probe-norm")
    commands = [shlex.split(words) for words in Parsed(text).words["code"]]
    assert [words[:2] for words in commands] == [
        ["linattn", name] for name in ("train", "capacity-sweep", "eval", "latency", "verify-scan", "probe-norm")
    ]
    for words, name in zip(commands, ("run", "sweep", "eval", "latency", "verify-scan", "probe-norm"), strict=True):
        code, out, err = call(capsys, *words[1:], "--json", "--quiet")
        assert code == 0, (words, err)
        again = json.loads(out)
        if name == "run":
            first = json.loads((sources["run"] / "result.json").read_text())
            assert again["summary"]["accuracy"] == first["summary"]["accuracy"]
        elif name == "sweep":
            assert again["summary"]["finished"] == 8
        else:
            first = json.loads(sources[name].read_text())
            assert again["config"] == first["config"], name
            assert len(again["results"]) == len(first["results"])


def test_the_command_of_a_latency_names_the_graphs_and_the_peer(sources):
    document = json.loads(sources["latency"].read_text())
    document["config"] |= {"cuda_graph": True, "with_fla": True}
    words = shlex.split(str(reproduce.of_document(document)))
    assert {"--cuda-graph", "--with-fla"} < set(words)


def test_a_run_under_way_is_reported_with_what_continues_it(capsys, sources, tmp_path):
    copy = tmp_path / "half"
    shutil.copytree(sources["other"], copy)
    (copy / "result.json").unlink()
    code, out, err = call(capsys, "report", copy, "-o", tmp_path / "r.html", "--json")
    assert (code, json.loads(out)["results"][0]["status"]) == (0, "unfinished"), err
    text = (tmp_path / "r.html").read_text()
    assert "not finished" in text
    assert f"linattn train --resume --out {copy}" in text
    (copy / "metrics.jsonl").unlink()
    assert call(capsys, "report", copy, "-o", tmp_path / "r.html")[0] == 0


def test_a_failure_is_on_the_page(capsys, sources, tmp_path):
    words = ["verify-scan", "--models", "linear", "--quick", "--dtypes", "float64", "--device", "cpu", "--quiet"]
    _, out, _ = call(capsys, *words, "--inject", "stale-state", "--json")
    (tmp_path / "v.json").write_text(out)
    code, _, err = call(capsys, "report", tmp_path / "v.json", "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert code == 0, err
    assert '<span class="status bad">failed</span>' in text
    assert "Beyond budget" in text
    assert "--inject stale-state" in text


def test_wrong_sources_are_named_and_no_page_is_written(capsys, sources, tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    (tmp_path / "y.json").write_text("no json")
    damaged = json.loads(sources["latency"].read_text())
    del damaged["results"][0]["impl"]
    (tmp_path / "z.json").write_text(json.dumps(damaged))
    (tmp_path / "empty").mkdir()
    cases = [
        ([tmp_path / "no such"], "does not exist"),
        ([tmp_path / "empty"], "is not a run folder"),
        ([tmp_path / "x.json"], "no document of linattn"),
        ([tmp_path / "y.json"], "is not JSON"),
        ([tmp_path / "z.json"], "no complete document of latency"),
        ([sources["run"], sources["run"]], "is given twice"),
        ([], "Missing argument"),
    ]
    for words, message in cases:
        code, out, err = call(capsys, "report", *words, "-o", tmp_path / "r.html")
        assert (code, out) == (2, ""), message
        assert message in err
        assert not (tmp_path / "r.html").exists()
    for out_, message in (
        (tmp_path / "r.pdf", "--out must end in .html or .htm"),
        (tmp_path / "no" / "r.html", "there is no folder"),
        ("/proc/r.html", "cannot write /proc/r.html"),
    ):
        code, _, err = call(capsys, "report", sources["other"], "-o", out_)
        assert code == 2
        assert message in err


def test_everything_from_a_source_is_escaped():
    nasty = '<img src="http://x/y" onerror=alert(1)>'
    section = Section(
        *(nasty,) * 4,
        figures={nasty: nasty},
        tables=[Table(nasty, [{nasty: nasty}]), Table(nasty, [{nasty: 1.0}], folded=True)],
        settings=nasty,
        env={nasty: nasty},
        commands=[nasty],
        notes=[nasty],
    )
    text = page(nasty, [section, section])
    assert "<img" not in text
    assert text.count("&lt;img") > 25
    assert Parsed(text).open == []
    assert "default-src &#x27;none&#x27;" in text


def test_long_training_is_thinned_out_evenly():
    lines = [{"step": step} for step in range(1, 1001)]
    shown = _metrics(lines).rows
    assert len(shown) == LINES
    assert (shown[0], shown[-1]) == (lines[0], lines[-1])
    assert _metrics(lines[:7]).rows == lines[:7]


def test_commands_are_quoted_and_ask_for_trust_where_it_is_needed():
    assert reproduce.of_run(Path("a b"), {"model": {"name": "x.py:Mine"}}).endswith("'a b/recipe.yaml' --trust")
    assert reproduce.of_sweep(Path("s"), [Path("s/sweep.yaml"), Path("s/sweep-2.yaml")])[1] == (
        "linattn capacity-sweep --resume --out s-again --recipe s/sweep-2.yaml"
    )
    assert reproduce.of_document({"command": "doctor", "config": {}, "env": {}, "results": [], "summary": {}}) is None


# What `.ci/run` sets once it has a browser: then none of these may be left out.
needs_browser = pytest.mark.skipif(
    headless.find() is None and not os.environ.get("LINATTN_REQUIRE_BROWSER"),
    reason="no chromium or chrome here: apt-get install chromium, or name one in LINATTN_BROWSER",
)


@needs_browser
def test_a_browser_shows_the_page_at_every_width_without_network(capsys, sources, tmp_path):
    names = ["run", "other", "sweep", "eval", "latency", "verify-scan", "probe-norm"]
    report(capsys, sources, tmp_path, *names)
    path = headless.find()
    assert path is not None
    url = (tmp_path / "r.html").as_uri()
    with headless.Browser(path, tmp_path / "profile") as browser:
        for width, height, phone in ((1280, 900, False), (390, 844, True), (320, 640, True)):
            visit = browser.open(url, width=width, height=height, phone=phone)
            assert visit.requests == [url]
            assert visit.messages == []
            assert visit.client_width == width
            assert visit.scroll_width == width, visit.sticking_out
            assert visit.sticking_out == []
            assert visit.png.startswith(b"\x89PNG")
        shown = browser.evaluate(
            url,
            """({svgs: [...document.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().height > 100).length,
                 headings: document.querySelectorAll('h2').length,
                 links: [...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash)),
                 text: document.body.innerText})""",
        )
    assert shown["svgs"] == 2 + 2 + 2 + 2 + 2 + 1 + 2 + 4
    assert shown["headings"] == 8
    assert shown["links"] is True
    assert "<script>alert(1)<_script>" in shown["text"]
    assert "training batch" in shown["text"]  # the text of the drawings is text


@needs_browser
def test_the_browser_test_can_fail(tmp_path):
    path = headless.find()
    assert path is not None
    bad = "<p style='width:900px'>wide</p><script>console.error('no')</script><img src='http://127.0.0.1:9/x.png'>"
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><meta name=viewport content='width=device-width'>{bad}")
    with headless.Browser(path, tmp_path / "profile") as browser:
        visit = browser.open((tmp_path / "bad.html").as_uri(), width=390, height=844, phone=True)
    assert "http://127.0.0.1:9/x.png" in visit.requests
    assert any("no" in message for message in visit.messages)
    assert visit.sticking_out
    assert any(re.match(r"P ", found) for found in visit.sticking_out)
