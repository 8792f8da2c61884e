"""Look the installed requirements up among the known vulnerabilities: `make audit`.

pip-audit says that all is well, too, where it could look nothing up. This says which it was.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

# An environment of its own: what it needs is none of the project's requirements.
ENVIRONMENT = Path(".venv/pip-audit")
LIMIT_SECONDS = 600


def verdict(report: dict[str, Any]) -> tuple[int, str]:
    """Tell what a report of pip-audit means: an exit code, and the sentences."""
    found = report["dependencies"]
    asked = [each for each in found if "skip_reason" not in each]
    lines = [
        f"{each['name']} {each['version']}: {fault['id']}, mended in"
        f" {', '.join(fault['fix_versions']) or 'no version yet'}"
        for each in asked
        for fault in each["vulns"]
    ]
    if not asked:
        return 0, f"Nothing is known: none of {len(found)} packages could be looked up."
    unknown = [each["name"] for each in found if "skip_reason" in each]
    if unknown:
        lines.append(f"Could not be looked up: {', '.join(unknown)}.")
    vulnerable = sum(bool(each["vulns"]) for each in asked)
    lines.append(f"{len(asked)} packages were looked up, {vulnerable} have known vulnerabilities.")
    return (1 if vulnerable else 0), "\n".join(lines)


def main() -> int:
    """Run pip-audit over what is installed beside this Python."""
    program = ENVIRONMENT / "bin" / "pip-audit"
    if not program.exists():
        print("Nothing is known: pip-audit could not be installed.")
        return 0
    installed = sysconfig.get_path("purelib")
    done = subprocess.run(
        [program, "--path", installed, "--format", "json", "--progress-spinner", "off"],
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    try:
        report = json.loads(done.stdout)
    except ValueError:
        # It found nobody to ask.
        print(f"Nothing is known: pip-audit ended without a report.\n{done.stderr[-1000:]}")
        return 0
    code, text = verdict(report)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
