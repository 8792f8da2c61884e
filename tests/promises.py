"""Which test guards each promise of the docs: python -m tests.promises prints the list.

The files promises*.txt beside the tests hold it, a line for each: where the promise stands, its
words, and the test. "error 54" instead of a page names an error of the SQL functions.
"""

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ERROR = re.compile(r"error (\d+)")


@dataclass(frozen=True)
class Promise:
    """Words of a page, or an error, and the test that guards it."""

    where: str
    words: str
    test: str

    @property
    def fault(self) -> str | None:
        """What is wrong with this line, or None."""
        path, _, name = self.test.partition("::")
        file = ROOT / path
        if not file.is_file():
            return f"{self.test}: there is no such file"
        if name and not re.search(
            rf"^ *(async )?def {re.escape(name)}\(", file.read_text(), re.MULTILINE
        ):
            return f"{self.test}: there is no such test"
        if ERROR.fullmatch(self.where):
            return None
        page = ROOT / self.where
        if not page.is_file():
            return f"{self.where}: there is no such page"
        if self.words not in page.read_text():
            return f"{self.where} does not say: {self.words}"
        return None


def promises() -> list[Promise]:
    """All of them, in the order of the pages."""
    lines = (line for file in TESTS.rglob("promises*.txt") for line in file.read_text().split("\n"))
    found = [
        Promise(*(part.strip() for part in line.split(" | ")))
        for line in lines
        if line.strip() and not line.startswith("#")
    ]
    return sorted(found, key=lambda each: (each.where, each.words))


def faults() -> list[str]:
    """What does not fit, and the errors that no test guards."""
    listed = promises()
    known = {
        int(n)
        for n in re.findall(
            r"^\| (\d+) \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE
        )
    }
    guarded = {int(m[1]) for each in listed if (m := ERROR.fullmatch(each.where))}
    missing = [f"error {number}: no test guards it" for number in sorted(known - guarded)]
    return [fault for each in listed if (fault := each.fault)] + missing


if __name__ == "__main__":
    for promise in promises():
        print(promise.where, promise.words, promise.test, sep=" | ")
    raise SystemExit("\n".join(faults()) or None)
