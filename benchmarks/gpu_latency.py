"""The GPU tables of gpu_latency.md: every mixer beside softmax and flash-linear-attention, by `linattn latency`.

    python benchmarks/gpu_latency.py --out DIR [--only peers_forward,peers_train,...]

Runs the commands listed below one after the other, keeps each one's JSON document in DIR as soon as it is there,
and prints Markdown made from all documents in DIR. With `--tables-only` nothing is run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

WIDE = "linear,deltanet,decay_delta,gated_deltanet,vla,hla2,ahla,hla3"
ALL = f"{WIDE},mesa,rls"
AGAINST_PEERS = "linear_scan,delta_scan,linear,deltanet,vla,hla2,ahla,hla3"
LENGTHS = "1k,2k,4k,8k,16k,32k,128k"
COMMANDS = {
    "peers_forward": f"--models {AGAINST_PEERS},mesa,penalty_gain --seq-lens 8k,32k --with-fla",
    "peers_train": "--models delta_scan,deltanet,vla --seq-lens 32k --mode train --with-fla",
    "linear_peer_train": "--models linear_scan,linear,hla2,ahla,hla3 --seq-lens 32k --mode train --with-fla",
    "forward": f"--models {ALL} --seq-lens {LENGTHS}",
    "train": f"--models {ALL} --seq-lens {LENGTHS} --mode train",
    "forward_graph": f"--models {ALL} --seq-lens {LENGTHS} --cuda-graph",
    "train_graph": f"--models {ALL} --seq-lens {LENGTHS} --mode train --cuda-graph",
    "decode": f"--models {ALL} --seq-lens 1k,8k,32k,128k --mode decode",
    "decode_graph": f"--models {ALL} --seq-lens 1k,8k,32k,128k --mode decode --cuda-graph",
    "wide_forward": f"--models {WIDE} --seq-lens 8k,32k --heads 8 --d-head 128",
    "wide_train": f"--models {WIDE} --seq-lens 8k,32k --heads 8 --d-head 128 --mode train",
    "wide_inverse_forward": "--models mesa,rls --seq-lens 8k,32k --heads 8 --d-head 128",
    "wide_inverse_train": "--models mesa,rls --seq-lens 8k,32k --heads 8 --d-head 128 --mode train",
    "sequential": "--models vla --impl reference,chunk,triton --seq-lens 2k --no-gate",
    "wide_peers": f"--models {AGAINST_PEERS} --seq-lens 32k --heads 8 --d-head 128 --with-fla",
}
# The peers take ready features and divide nothing, so the like of FLA's linear attention and delta rule are the two
# primitives; a mixer's row has its features, gains and read-out in it. Of mesa the gain alone, and the whole.
PEER = {"linear_scan": "fla-linear", "linear": "fla-linear", "hla2": "fla-linear", "ahla": "fla-linear",
        "hla3": "fla-linear", "delta_scan": "fla-delta", "deltanet": "fla-delta", "vla": "fla-delta",
        "mesa": "fla-mesa", "penalty_gain": "fla-mesa"}  # fmt: skip


def run(name: str, out: Path, timeout: float) -> None:
    command = [sys.executable, "-m", "linattn_cli", "latency", *COMMANDS[name].split(), "--quiet", "--json"]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"{name}: not done in {timeout:.0f} s", flush=True)
        return
    print(f"{name}: exit {done.returncode}, {time.perf_counter() - begin:.0f} s", flush=True)
    if done.stderr:
        (out / f"{name}.err").write_text(done.stderr)
    if done.stdout.startswith("{"):
        document = json.loads(done.stdout)
        document["command_line"] = f"linattn latency {COMMANDS[name]}"
        (out / f"{name}.json").write_text(json.dumps(document) + "\n")


def timed(document: dict) -> dict[tuple[str, int], dict]:
    return {(r["model"], r["seq_len"]): r for r in document["results"] if r["latency_ms_p50"] is not None}


def length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def by_length(document: dict) -> str:
    """Milliseconds, models by lengths, and how the longest compares with a quarter of it."""
    found = timed(document)
    lengths = sorted({tokens for _, tokens in found})
    rows = []
    for model in dict.fromkeys(r["model"] for r in document["results"]):
        row = {"ms": model}
        for tokens in lengths:
            cell = found.get((model, tokens))
            row[length(tokens)] = f"{cell['latency_ms_p50']:.3g}" if cell else "-"
        near, far = (found.get((model, t)) for t in (32768, 131072))
        if near and far:
            row["128k / 32k"] = f"{far['latency_ms_p50'] / near['latency_ms_p50']:.2f}"
        largest = found.get((model, 32768))
        if largest and largest.get("roofline_fraction"):
            row["roofline at 32k"] = f"{largest['roofline_fraction']:.1%}"
        crossing = next((v for k, v in document["summary"].items() if k.startswith(f"crossover_{model}_")), None)
        if crossing:
            row["crossover"] = str(crossing["tokens"] or crossing["status"])
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github")


def against_peers(document: dict) -> str:
    """Each model over its peer of the same run."""
    found = timed(document)
    rows = []
    for (model, tokens), row in found.items():
        peer = found.get((PEER.get(model, ""), tokens))
        if peer:
            rows.append({
                "model": model, "mode": row["mode"], "tokens": length(tokens), "ms": f"{row['latency_ms_p50']:.3f}",
                "peer": peer["model"], "peer ms": f"{peer['latency_ms_p50']:.3f}",
                "ratio": f"{row['latency_ms_p50'] / peer['latency_ms_p50']:.2f}",
                "first call s": f"{row['first_call_s']:.2f}", "peer's s": f"{peer['first_call_s']:.1f}",
                "memory ratio": f"{row['peak_memory_mib'] / peer['peak_memory_mib']:.2f}",
            })  # fmt: skip
    return tabulate(rows, headers="keys", tablefmt="github")


def against_sequential(document: dict) -> str:
    """Each implementation over the recurrence token by token."""
    rows = [
        {"model": r["model"], "impl": r["impl"], "tokens": length(r["seq_len"]), "ms": f"{r['latency_ms_p50']:.3g}",
         "times as fast": f"{r['speedup_over_reference']:.0f}"}
        for r in document["results"] if r["speedup_over_reference"]
    ]  # fmt: skip
    return tabulate(rows, headers="keys", tablefmt="github")


def table(name: str, document: dict) -> str:
    if "--with-fla" in COMMANDS[name]:
        return against_peers(document)
    return against_sequential(document) if name == "sequential" else by_length(document)


def tables(out: Path) -> str:
    parts = []
    for name in COMMANDS:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        env = document["env"]
        versions = ", ".join(f"{key} {env[key]}" for key in ("torch", "triton", "device_name") if env.get(key))
        parts.append(f"### `{document['command_line']}`\n\n{document['summary'].get('shape')}; {versions}\n")
        parts.append(table(name, document) + "\n")
        bad = [r for r in document["results"] if r["status"] not in ("ok", "over budget")]
        parts += [f"- {r['model']} at {r['seq_len']}: {r['status']}: {r['reason']}\n" for r in bad]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(COMMANDS), help="which of the commands to run")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one command")
    parser.add_argument("--tables-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in [] if options.tables_only else options.only.split(","):
        run(name, options.out, options.timeout)
    print(tables(options.out))


if __name__ == "__main__":
    main()
