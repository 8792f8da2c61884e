"""Runs the benchmarks, each in its own process: `make bench`, `make bench-quick`.

python -m benchmarks [NAME ...] [--rounds 5]: measure, and write results.json, results.md, the
tables of docs/explanation/performance.md and the charts. Findings replace the earlier ones of the
same program.
python -m benchmarks --quick [--save]: measure a few rows in two minutes, and compare them with
expected.json. If a row is slower, its program runs up to twice more, and all rounds count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import expected, stored_results, tables
from benchmarks.programs import PROGRAMS, QUICK
from benchmarks.results import ROUNDS, Findings, Row

REPEATS = 2


def run_program(program: str, *arguments: str) -> Findings | None:
    """Run one benchmark; return None if it failed."""
    print(f"\n== {program}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.json"
        command = [sys.executable, "-m", f"benchmarks.{program}", "--json", str(file), *arguments]
        if subprocess.run(command, check=False).returncode != 0:
            return None
        return Findings.of(json.loads(file.read_text("utf-8")))


def run_full(programs: list[str], rounds: int) -> int:
    """Measure and write the results; print rows that are slower than expected.

    Returns 1 if a program failed.
    """
    expected_ratios = expected.load()
    failed = []
    for program in programs:
        findings = run_program(program, "--rounds", str(rounds))
        if findings is None:
            failed.append(program)
        else:
            stored_results.store(program, findings, rounds)
            known = [row for row in findings.rows if row.key in expected_ratios]
            for error in expected.find_regressions(known, expected_ratios):
                print(f"slower than expected: {error}", file=sys.stderr)
    write_documents()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


def write_documents() -> None:
    """Write tables and charts of the stored results."""
    from benchmarks import charts

    machine, versions, stored = stored_results.load(list(PROGRAMS))
    tables.write(machine, versions, stored)
    charts.draw(stored)


def run_quick(programs: list[str], *, saves: bool) -> int:
    """Measure a few rows; return 1 if one is slower than expected, or store all if ``saves``."""
    findings = {program: run_program(program, "--quick") for program in programs}
    failed = [program for program, each in findings.items() if each is None]
    rows = [row for each in findings.values() if each for row in each.rows]
    if saves and not failed:
        expected.save(rows)
        return 0
    ratios = expected.load()
    errors = [f"{program} failed" for program in failed]
    for program, each in findings.items():
        if each:
            errors += find_regressions(program, each.rows, ratios)
    print("\n" + ("\n".join(["slower than expected:", *errors]) if errors else "as expected"))
    return len(errors) > 0


def find_regressions(program: str, rows: list[Row], ratios: dict[str, float]) -> list[str]:
    """Describe the rows that are slower than expected, also after two more runs."""
    for _ in range(REPEATS):
        if not expected.find_regressions(rows, ratios):
            break
        again = run_program(program, "--quick")
        if again is None:
            return [f"{program} failed"]
        rows = [row.with_rounds_of(other) for row, other in zip(rows, again.rows, strict=True)]
    return expected.find_regressions(rows, ratios)


def main() -> int:
    """Parse the arguments and run the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="compare a few rows with expected.json"
    )
    parser.add_argument("--save", action="store_true", help="with --quick: write expected.json")
    parser.add_argument("--draw", action="store_true", help="only write tables and charts")
    arguments = parser.parse_args()
    if arguments.draw:
        write_documents()
        return 0
    if arguments.quick:
        return run_quick(arguments.programs or list(QUICK), saves=arguments.save)
    return run_full(arguments.programs or list(PROGRAMS), arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
