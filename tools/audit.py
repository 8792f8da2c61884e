"""Check the installed packages for known vulnerabilities: `make audit`.

pip-audit also succeeds if it cannot look up any package. Then this program prints that the result
is unknown.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

# A separate environment, so that pip-audit's own dependencies are not among the checked packages.
PIP_AUDIT_ENVIRONMENT = Path(".venv/pip-audit")
TIMEOUT_SECONDS = 600


def summarize(report: dict[str, Any]) -> tuple[int, str]:
    """Convert a report of pip-audit to an exit code and a text."""
    packages = report["dependencies"]
    checked = [package for package in packages if "skip_reason" not in package]
    lines = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in"
        f" {', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in checked
        for vulnerability in package["vulns"]
    ]
    if not checked:
        return 0, f"Result unknown: none of {len(packages)} packages could be looked up."
    unchecked = [package["name"] for package in packages if "skip_reason" in package]
    if unchecked:
        lines.append(f"Could not be looked up: {', '.join(unchecked)}.")
    vulnerable = sum(bool(package["vulns"]) for package in checked)
    lines.append(f"{len(checked)} packages checked, {vulnerable} have known vulnerabilities.")
    return (1 if vulnerable else 0), "\n".join(lines)


def main() -> int:
    """Run pip-audit on the packages of this Python environment; return the exit code."""
    program = PIP_AUDIT_ENVIRONMENT / "bin" / "pip-audit"
    if not program.exists():
        print("Result unknown: pip-audit could not be installed.")
        return 0
    installed = sysconfig.get_path("purelib")
    completed = subprocess.run(
        [program, "--path", installed, "--format", "json", "--progress-spinner", "off"],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    try:
        report = json.loads(completed.stdout)
    except ValueError:
        # pip-audit could not reach its database of vulnerabilities.
        print(f"Result unknown: pip-audit returned no report.\n{completed.stderr[-1000:]}")
        return 0
    code, text = summarize(report)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
