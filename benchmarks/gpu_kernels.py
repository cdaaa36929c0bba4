"""Check the Triton primitives against float64 on a GPU, then time them beside flash-linear-attention's.

    python benchmarks/gpu_kernels.py --json gpu_kernels.json [--check-only] [--profile] [--seq-lens 32768,8192]

A figure is printed only after every check passed (`--no-gate`: regardless). Kernels are compiled while the checks
run, and timed after them. The peers are timed in the same run, on tensors of the same
shapes; they are left out where flash-linear-attention is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize
from triton.testing import do_bench

from linattn_cli.kernels.delta import delta_scan
from linattn_cli.kernels.delta.triton import delta_scan_triton
from linattn_cli.kernels.linear import linear_scan
from linattn_cli.kernels.linear.triton import linear_scan_triton
from linattn_cli.kernels.penalty import penalty_gain
from linattn_cli.kernels.penalty.triton import penalty_gain_triton

DEVICE = "cuda"
LAMBDA0 = 0.1


def draw(*shape: int, unit: bool = False, scale: float = 1.0) -> Tensor:
    x = torch.randn(*shape, device=DEVICE)
    return (normalize(x, dim=-1) if unit else x) * scale


def decays(kind: str | None, B: int, T: int, H: int) -> dict[str, Tensor]:
    if kind is None:
        return {}
    log_decay = -0.1 * torch.rand(B, T, H, device=DEVICE)
    if kind == "mixed":
        log_decay[:, ::5] = -50.0
    return {"log_decay": torch.zeros_like(log_decay) if kind == "zero" else log_decay}


def inputs(operator: str, B: int, T: int, Q: int, H: int, K: int, V: int, decay: str | None) -> dict[str, Tensor]:
    if operator == "penalty_gain":
        return {"u": draw(B, T, H, K, unit=True, scale=K**-0.5), "k": draw(B, T, Q, K, unit=True)}
    scale = K**-0.5
    tensors = {"q": draw(B, T, Q, K, scale=scale), "v": draw(B, T, H, V), **decays(decay, B, T, H)}
    if operator == "linear_scan":
        return {**tensors, "k": draw(B, T, H, K, scale=scale), "initial_state": draw(B, H, K, V)}
    tensors["p"] = draw(B, T, H, K, unit=True)
    write = normalize(tensors["p"] + draw(B, T, H, K, scale=0.3 * scale), dim=-1)
    return {**tensors, "a": write, "initial_state": draw(B, H, K, V)}


def outputs(operator: str, impl: str, tensors: dict[str, Tensor], dtype: torch.dtype, flags: dict, upstream):
    """Outputs and gradients of one implementation, by name."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    held = {
        name: x.to(state if name in ("log_decay", "initial_state") else dtype).detach().requires_grad_()
        for name, x in tensors.items()
    }
    if operator == "penalty_gain":
        out = penalty_gain(held["u"], held["k"], lambda0=LAMBDA0, impl=impl)
        results = {"x": out.o, "mass": out.final_state.mass, "inverse": out.final_state.inverse}
    elif operator == "linear_scan":
        out = linear_scan(**held, **flags, impl=impl)
        results = {"o": out.o, "state": out.final_state}
    else:
        out = delta_scan(**held, **flags, impl=impl, return_residual=True)
        results = {"o": out.o, "state": out.final_state, "residual": out.residual}
    loss = sum((x.to(state) * upstream(name, x).to(state)).sum() for name, x in results.items() if name != "residual")
    grads = torch.autograd.grad(loss, list(held.values()))
    results |= {f"d_{name}": grad for name, grad in zip(held, grads, strict=True)}
    return {name: x.detach().double() for name, x in results.items()}


def check(operator, shape, decay=None, dtypes=("float32", "bfloat16", "float16"), serial=True, **flags) -> list[dict]:
    """Largest error relative to max|float64|, against 2 x the serial form's own in that dtype + 4 eps."""
    torch.manual_seed(0)
    tensors = inputs(operator, *shape, decay)
    seeds: dict[str, Tensor] = {}

    def upstream(name: str, like: Tensor) -> Tensor:
        if name not in seeds:
            seeds[name] = torch.randn(like.shape, device=DEVICE) * (1.0 if name in ("o", "x") else 0.1)
            if name in ("mass", "inverse"):
                seeds[name] = seeds[name] + seeds[name].mT
        return seeds[name]

    rows = []
    for name in dtypes:
        dtype = getattr(torch, name)
        rounded = {n: x.to(torch.float32 if n in ("log_decay", "initial_state") else dtype) for n, x in tensors.items()}
        truth = outputs(operator, "chunk", rounded, torch.float64, flags, upstream)
        ours = outputs(operator, "triton", rounded, dtype, flags, upstream)
        again = outputs(operator, "triton", rounded, dtype, flags, upstream)
        base = outputs(operator, "reference" if serial else "chunk", rounded, dtype, flags, upstream)
        eps = torch.finfo(dtype).eps
        for quantity, exact in truth.items():
            scale = exact.abs().max().clamp_min(1e-30)
            if quantity == "d_log_decay":  # it cancels (MATH.md section 7)
                scale = torch.maximum(scale, (rounded["q"].double() * truth["d_q"]).sum(-1).abs().max())
            error = ((ours[quantity] - exact).abs().max() / scale).item()
            budget = 2 * ((base[quantity] - exact).abs().max() / scale).item() + 4 * eps
            same = torch.equal(ours[quantity], again[quantity])
            rows.append({
                "operator": operator, "shape": list(shape), "decay": decay, "flags": flags, "dtype": name,
                "quantity": quantity, "max_error": error, "budget": budget, "deterministic": same,
                "passed": bool(error <= budget and same),
            })  # fmt: skip
    return rows


def cases() -> list[dict]:
    """Arguments of every `check`."""
    small, odd = (2, 300, 4, 4, 64, 64), (1, 217, 4, 2, 40, 72)
    wide, widest = (1, 130, 2, 1, 128, 128), (1, 100, 1, 1, 256, 200)
    both = ("float32", "bfloat16")
    listed: list[dict] = []
    for shape, decay, reverse in itertools.product((small, odd), (None, "mixed"), (False, True)):
        listed.append({"operator": "delta_scan", "shape": shape, "decay": decay, "dtypes": both, "reverse": reverse})
        flags = {"exclusive": shape is odd, "reverse": reverse}
        listed.append({"operator": "linear_scan", "shape": shape, "decay": decay, "dtypes": both, **flags})
    for operator in ("delta_scan", "linear_scan", "penalty_gain"):
        listed.append({"operator": operator, "shape": widest, "dtypes": both})
        listed.append({"operator": operator, "shape": wide, "dtypes": both})
        listed.append({"operator": operator, "shape": (1, 1, 2, 2, 16, 16), "dtypes": ("float32",)})
        listed.append({"operator": operator, "shape": odd, "dtypes": ("float16",)})
        listed.append({"operator": operator, "shape": (1, 8192, 16, 16, 64, 64), "dtypes": both, "serial": False})
    listed += [{"operator": "penalty_gain", "shape": shape, "dtypes": both} for shape in (small, odd)]
    listed.append({"operator": "delta_scan", "shape": small, "decay": "random", "dtypes": both})
    return listed


def _run_check(arguments: dict) -> list[dict]:
    try:
        return check(**arguments)
    except Exception as error:
        failure = {key: str(value) for key, value in arguments.items()}
        return [failure | {"passed": False, "error": f"{type(error).__name__}: {str(error)[-600:]}"}]


def problem(T: int, H: int, d: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False):
    torch.manual_seed(1)
    q, k, v, u = (draw(1, T, H, d) for _ in range(4))
    u = normalize(u, dim=-1) * d**-0.5
    beta = torch.rand(1, T, H, device=DEVICE)
    return [x.to(dtype).requires_grad_(requires_grad) for x in (q, k, v, u, beta)]


def phi(x: Tensor) -> Tensor:
    return elu(x) + 1


def ours_vla(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """VLA from its four tensors to the read-out, as `forms/vla.py` composes it by default."""
    from linattn_cli.kernels.forms.vla import vla

    return vla(q, k, v, u, impl="triton").o


def operators(T: int, H: int, d: int) -> dict[str, tuple[Callable, Callable]]:
    """name -> (forward, list of tensors that take gradients)."""
    q, k, v, u, beta = problem(T, H, d, requires_grad=True)
    unit = normalize(k.detach().float(), dim=-1).to(k.dtype).requires_grad_()
    write = (unit * beta[..., None]).detach().requires_grad_()
    plain = {"log_decay": None, "initial_state": None, "reverse": False, "chunk_size": None}
    table = {
        "linear": (lambda: linear_scan_triton(q, k, v, exclusive=False, **plain)[0], [q, k, v]),
        "deltanet": (
            lambda: delta_scan_triton(q, unit, write, v, return_residual=False, **plain)[0],
            [q, unit, write, v],
        ),
        "penalty_gain": (
            lambda: penalty_gain_triton(u, unit, lambda0=LAMBDA0, initial_state=None, chunk_size=None)[0],
            [u, unit],
        ),
        "vla": (lambda: ours_vla(q, k, v, u), [q, k, v, u]),
    }
    qh, kh, vh = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    table["sdpa"] = (lambda: sdpa(qh, kh, vh, is_causal=True), [qh, kh, vh])
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.mesa_net import chunk_mesa_net
    except ImportError:
        return table
    gate = torch.zeros(1, T, H, device=DEVICE)
    ones, ridge = torch.ones(1, T, H, device=DEVICE), torch.full((H, d), LAMBDA0, device=DEVICE)
    table["fla_linear"] = (lambda: chunk_linear_attn(q, k, v, normalize=False)[0], [q, k, v])
    table["fla_delta"] = (lambda: chunk_delta_rule(q, unit, v, beta)[0], [q, unit, v, beta])
    table["fla_mesa"] = (lambda: chunk_mesa_net(q, unit, v, gate, ones, ridge)[0], [q, unit, v])
    return table


def timed(forward: Callable, leaves: list[Tensor], train: bool) -> dict:
    upstream = torch.randn_like(forward())

    def step() -> None:
        if train:
            torch.autograd.grad(forward(), leaves, upstream)
        else:
            with torch.no_grad():
                forward()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    low, median, high = do_bench(step, warmup=25, rep=150, quantiles=[0.2, 0.5, 0.8])
    return {"ms_p50": median, "ms_p20": low, "ms_p80": high, "peak_memory_mib": peak}


def profile(forward: Callable, leaves: list[Tensor]) -> None:
    """Time of each kernel of one training step, the longest first."""
    o = forward()
    upstream = torch.randn_like(o)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        for _ in range(5):
            torch.autograd.grad(forward(), leaves, upstream)
        torch.cuda.synchronize()
    events = sorted(run.key_averages(), key=lambda e: -e.device_time_total)
    for event in events[:16]:
        print(f"    {event.device_time_total / 5000:8.3f} ms x{event.count // 5:<3d} {event.key[:70]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-gate", action="store_true", help="time also where a check failed")
    parser.add_argument("--workers", type=int, default=8, help="processes that check side by side")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="operators to time, comma-separated")
    parser.add_argument("--seq-lens", default="32768", help="peers are timed at the first of them only")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--d-head", type=int, default=64)
    args = parser.parse_args()
    document = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "versions": versions(),
        "gpu": torch.cuda.get_device_name(), "command": " ".join(sys.argv), "checks": [], "timings": [],
    }  # fmt: skip

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")

    pool = None if args.no_check else multiprocessing.get_context("spawn").Pool(args.workers)
    pending = pool.map_async(_run_check, cases(), chunksize=1) if pool else None
    seq_lens = [int(T) for T in args.seq_lens.split(",")]
    table, first_calls = {}, {}
    if not args.check_only:
        table = chosen(operators(seq_lens[0], args.heads, args.d_head), args.only)
        first_calls = {  # compile while the checks run
            (name, mode): first_call(*row, mode == "train") for name, row in table.items() for mode in modes(name)
        }
    failed = 0
    if pool and pending:
        document["checks"] = rows = [row for rows in pending.get() for row in rows]
        pool.terminate()
        failed = report(rows)
        save()
    if failed and not args.no_gate:
        return 1
    for T in seq_lens if table else []:
        if seq_lens[0] != T:
            table = chosen(operators(T, args.heads, args.d_head), args.only)
            table = {name: row for name, row in table.items() if not name.startswith("fla")}
        for name, (forward, leaves) in table.items():
            for mode in modes(name):
                if name == "sdpa" and T > 32768:
                    continue
                row = {"operator": name, "mode": mode, "seq_len": T, "heads": args.heads, "d_head": args.d_head}
                row |= timed(forward, leaves, mode == "train")
                row["first_call_s"] = first_calls[name, mode]
                document["timings"].append(row)
                spread = f"({row['ms_p20']:.3f} .. {row['ms_p80']:.3f})"
                cost = f"first {row['first_call_s']:6.2f} s  peak {row['peak_memory_mib']:8.0f} MiB"
                print(f"{name:14s} {mode:8s} T={T:<7d} {row['ms_p50']:8.3f} ms  {spread}  {cost}", flush=True)
            if args.profile and not name.startswith(("fla", "sdpa")):
                profile(forward, leaves)
        save()
    return 1 if failed else 0


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("torch", "triton", "flash-linear-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def modes(name: str) -> tuple[str, ...]:
    return ("forward",) if name in ("fla_linear", "fla_mesa") else ("forward", "train")


def chosen(table: dict, only: str) -> dict:
    names = set(filter(None, only.split(",")))
    return {name: row for name, row in table.items() if not names or name in names}


def report(rows: list[dict]) -> int:
    """Print the failed checks; their number."""
    bad = [row for row in rows if not row["passed"]]
    print(f"{len(rows)} checks, {len(bad)} failed", flush=True)
    for r in bad[:40]:
        if "error" in r:
            print(f"  {r}")
            continue
        print(
            f"  {r['operator']} {r['shape']} decay={r['decay']} {r['flags']} {r['dtype']} {r['quantity']}: "
            f"{r['max_error']:.2e} > {r['budget']:.2e} deterministic={r['deterministic']}"
        )
    return len(bad)


def first_call(forward: Callable, leaves: list[Tensor], train: bool) -> float:
    """Seconds until the first result, compilation included."""
    start = time.perf_counter()
    o = forward()
    if train:
        torch.autograd.grad(o, leaves, torch.ones_like(o))
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
