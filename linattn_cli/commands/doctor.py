"""`linattn doctor`: versions, devices, and a small check of every operator on them."""

from __future__ import annotations

from linattn_cli import output
from linattn_cli.options import DebugOption, DeviceOption, FormatOption, JsonOption, QuietOption


def doctor(
    device: DeviceOption = None,
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Show versions and devices, and check every operator here against its reference.

    Example: linattn doctor --json > machine.json

    Checks the CPU and the first GPU, or the --device given. Exit code 1 if an operator is wrong.
    """
    with output.command("doctor", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        from linattn_cli import environment
        from linattn_cli.selfcheck import check_operators

        first = environment.resolve_device(device or "auto")
        devices = [first] if device else list(dict.fromkeys([environment.resolve_device("cpu"), first]))
        doc.begin(device=first, dtype="float32", impl=environment.resolve_impl("auto", first))
        for place in devices:
            doc.results += check_operators(place)
        wrong = [row for row in doc.results if not row["passed"]]
        doc.summary = environment.inventory() | {
            "checks": len(doc.results),
            "checks_passed": len(doc.results) - len(wrong),
        }
        doc.columns = ["operator", "impl", "quantity", "max_error", "budget", "first_call_s", "latency_ms", "passed"]
        doc.columns[1:1] = ["device"] if len(devices) > 1 else []
        doc.columns += ["problem"] if any(row.get("problem") for row in wrong) else []
        if wrong:
            names = ", ".join(dict.fromkeys(f"{row['operator']} ({row['impl']}, {row['device']})" for row in wrong))
            doc.fail(
                f"{len(wrong)} of {len(doc.results)} checks failed: {names}",
                hint="do not trust results here. --impl chunk avoids Triton, --json has details to report",
            )
        else:
            doc.note("next: linattn verify-scan checks every mixer, with gradients and split calls")
