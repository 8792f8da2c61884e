"""The promises of the docs and their tests: python -m tests.promises prints and checks the list.

Each line of the files promises*.txt has a page, words on this page (several, if one test guards
them), and the test.
"error 54" in place of a page is an error of the SQL functions.
"""

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
ERROR = re.compile(r"error (\d+)")


@dataclass(frozen=True)
class Promise:
    """Words of a page, or an error number, and the test that guards it."""

    page: str
    words: str
    test: str

    @property
    def error(self) -> str | None:
        path, _, name = self.test.partition("::")
        file = ROOT / path
        if not file.is_file():
            return f"{self.test}: the file does not exist"
        if name and not re.search(
            rf"^ *(async )?def {re.escape(name)}\(", file.read_text(), re.MULTILINE
        ):
            return f"{self.test}: the test does not exist"
        if ERROR.fullmatch(self.page):
            return None
        page = ROOT / self.page
        if not page.is_file():
            return f"{self.page}: the page does not exist"
        if self.words not in " ".join(page.read_text().split()):
            return f"{self.page} does not contain: {self.words}"
        return None


def read_promises() -> list[Promise]:
    """Read all promises, and sort them by page."""
    lines = (line for file in TESTS.rglob("promises*.txt") for line in file.read_text().split("\n"))
    parts = [line.split(" | ") for line in lines if line.strip() and not line.startswith("#")]
    found = [
        Promise(page.strip(), words.strip(), test.strip())
        for page, *of_page, test in parts
        for words in of_page
    ]
    return sorted(found, key=lambda each: (each.page, each.words))


def find_errors() -> list[str]:
    """Return the errors of all lines, and the SQL errors that no test guards."""
    promises = read_promises()
    page = (ROOT / "docs/reference/errors.md").read_text()
    known = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    guarded = {int(m[1]) for each in promises if (m := ERROR.fullmatch(each.page))}
    missing = [f"error {number}: no test guards it" for number in sorted(known - guarded)]
    return [error for each in promises if (error := each.error)] + missing


if __name__ == "__main__":
    for promise in read_promises():
        print(promise.page, promise.words, promise.test, sep=" | ")
    raise SystemExit("\n".join(find_errors()) or None)
