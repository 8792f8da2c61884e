"""All benchmarks, each in a process of its own: `make bench`, `make bench-quick`.

python -m benchmarks [NAME ...] [--rounds 5]: measure, and write results.json, results.md, the table
of docs/explanation/performance.md and the charts. New findings of a program replace earlier ones.
python -m benchmarks --quick [--keep]: a few rows in under two minutes, against expected.json; what
fell is measured up to twice more, and the rounds of all runs count. --keep: expect from now on what
is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import expected, kept, tables
from benchmarks.programs import PROGRAMS, QUICK
from benchmarks.results import ROUNDS, Findings, Row

AGAIN = 2


def measured(program: str, *arguments: str) -> Findings | None:
    """Run one program; nothing where it failed, which it says itself."""
    print(f"\n== {program}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "findings.json"
        command = [sys.executable, "-m", f"benchmarks.{program}", "--json", str(found), *arguments]
        done = subprocess.run(command, check=False)
        return Findings.load(found) if done.returncode == 0 else None


def full(programs: list[str], rounds: int) -> int:
    """Measure and write the results: 1 where a program failed, 0 otherwise."""
    failed = []
    for program in programs:
        findings = measured(program, "--rounds", str(rounds))
        if findings is None:
            failed.append(program)
        else:
            kept.keep(program, findings, rounds)
    written()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


def written() -> None:
    """Write tables and charts of what is kept."""
    from benchmarks import charts

    machine, versions, found = kept.load(list(PROGRAMS))
    tables.write(machine, versions, found)
    charts.draw(found)


def quick(programs: list[str], *, is_kept: bool) -> int:
    """Measure in short and compare with what is expected: 1 where something fell."""
    found = {program: measured(program, "--quick") for program in programs}
    failed = [program for program, findings in found.items() if findings is None]
    rows = [row for findings in found.values() if findings for row in findings.rows]
    if is_kept and not failed:
        expected.save(rows)
        return 0
    wanted = expected.load()
    said = [f"{program} failed" for program in failed]
    for program, findings in found.items():
        if findings:
            said += fallen(program, findings.rows, wanted)
    print("\n" + ("\n".join(["slower than expected:", *said]) if said else "as expected"))
    return len(said) > 0


def fallen(program: str, rows: list[Row], wanted: dict[str, float]) -> list[str]:
    """Say what fell, by the rounds of up to three runs: one may be that of a busy moment."""
    for _ in range(AGAIN):
        if not expected.fallen(rows, wanted):
            break
        again = measured(program, "--quick")
        if again is None:
            return [f"{program} failed"]
        rows = [row.with_rounds_of(other) for row, other in zip(rows, again.rows, strict=True)]
    return expected.fallen(rows, wanted)


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating, each (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="compare a few rows with expected.json"
    )
    parser.add_argument("--keep", action="store_true", help="with --quick: expect what is measured")
    parser.add_argument("--draw", action="store_true", help="only write the results anew")
    arguments = parser.parse_args()
    if arguments.draw:
        written()
        return 0
    if arguments.quick:
        return quick(arguments.programs or list(QUICK), is_kept=arguments.keep)
    return full(arguments.programs or list(PROGRAMS), arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
