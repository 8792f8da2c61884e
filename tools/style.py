"""Style check of `make lint`: names, refused words, unusual constructions, modules, pages.

python -m tools.style [--list] [PATH ...]    with a PATH: only count the unusual constructions there
"""

import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = (
    "psqlmessages", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
    "CODE_OF_CONDUCT.md",
)  # fmt: skip
# A text must have fewer.
LIMIT_PER_1000_WORDS = 3.0
MAX_LINE = 120
ARCHITECTURE = "docs/explanation/architecture.md"
# The page ARCHITECTURE has a row for each module in these folders.
FOLDERS = ("admin", "client", "exchanges", "management", "monitor", "pipeline", "relay", "rest")
# Class names that Django prescribes.
DJANGO_CLASSES = {"Command", "Media", "Meta"}
# Class names that a model and another class may share.
MODEL_CLASSES = {"Element", "StreamMessage", "Subscription"}
SHARED_MODULES = ("admin", "models", "rest", "monitor", "migrations", "management")
REFUSED = re.compile(
    r"(^|_)(bury|buried|clerk|crew|faults?|hand|hears?|heard|horizons?|hearer|ledger|lookout|lose|mind|"
    r"mishap|office|outlook|patience|pulse|rouse|spot|standing|tall(y|ies)|tend|told|wakes)(_|$)"
)
UNUSUAL = re.compile(
    r"\b(?:(?:^|[.:;,(] *)(?:who|whoever|whose|what|where)\b"
    r"(?! (?:is|are|was|were|do|does|did|can|to)\b[^.]*\?)"
    r"|(?:of|for|by|to|with|from|and|or|than|as|that|on|in|is|are) (?:who|whom|whoever|whose)\b"
    r"|(?:of|with|from|and|or|than|as|on|in|is|are|but) what\b|all that\b|those (?:who|that)\b"
    r"|by (?:it|him|them)sel(?:f|ves)\b|(?:is|are|was|were|be) (?:told|kept|held up)\b|in hand\b"
    r"|any ?more\b|anew\b|so (?:many|long|much)(?! as)\b|in vain\b|no longer than\b|at once\b"
    r"|let go\b|(?:comes?|becomes?) of\b|nobody\b|may as well\b|as it (?:was|is)\b|once more\b"
    r"|meanwhile\b|without a word\b|(?:has|have|had) to be\b|(?:is|are) to\b|lest\b|amid\b|thus\b"
    r"|wherever\b|nor\b)",
    re.IGNORECASE | re.MULTILINE,
)


def python_text(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, with their lines."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        is_documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if is_documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    with path.open("rb") as lines:
        for token in tokenize.tokenize(lines.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("#: ")


def markdown_text(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without its blocks of code."""
    is_code = False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            yield number, re.sub(r"`[^`]*`", "`code`", line)


def sql_text(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a script, and the texts of COMMENT ON."""
    text = path.read_text()
    for match in re.finditer(r"(?:^ *--.*\n)+|\bIS\s+'(?:[^']|'')*'", text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, match.group()


TEXTS = {".py": python_text, ".md": markdown_text, ".sql": sql_text}


def texts(paths: list[Path]) -> Iterator[tuple[Path, int, str]]:
    """Yield the texts of files and folders, with path and line."""
    for top in paths:
        for path in [top] if top.is_file() else sorted(top.rglob("*.*")):
            if path.suffix in TEXTS and "migrations" not in path.parts:
                for line, text in TEXTS[path.suffix](path):
                    yield path, line, text


def rate(paths: list[Path], *, prints: bool) -> float:
    """Return the number of unusual constructions per 1,000 words; print each if ``prints``."""
    words = constructions = 0
    for path, line, text in texts(paths):
        words += len(re.findall(r"[A-Za-z']+", text))
        for match in UNUSUAL.finditer(text):
            constructions += 1
            if prints:
                number = line + text.count("\n", 0, match.start())
                excerpt = " ".join(text[max(0, match.start() - 30) :].split())[:80]
                print(f"{path}:{number}: {excerpt}")
    return 1000 * constructions / max(words, 1)


def name_errors() -> Iterator[str]:
    """Yield an error for each class or module name that occurs twice, and for each refused word."""
    names = defaultdict(list)
    files = sorted((ROOT / "psqlmessages").rglob("*.py"))
    for path in (path for path in files if "migrations" not in path.parts):
        name = str(path.relative_to(ROOT))
        if path.stem != "__init__" and not any(part in SHARED_MODULES for part in path.parts):
            names[f"module {path.stem}"].append(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower()
            if refused := REFUSED.search(words):
                word = refused.group().strip("_")
                yield f"{name}:{node.lineno}: {node.name}: {word!r} is a refused word"
            if isinstance(node, ast.ClassDef) and node.name not in DJANGO_CLASSES:
                is_model = "models" in path.parts and node.name in MODEL_CLASSES
                kind = "model" if is_model else "class"
                names[f"{kind} {node.name}"].append(f"{name}:{node.lineno}")
    for name, occurrences in names.items():
        if len(occurrences) > 1:
            yield f"{name} occurs twice: {', '.join(occurrences)}"


def unlisted_modules() -> Iterator[str]:
    """Yield an error for each module without a row on the page of the architecture."""
    page = (ROOT / ARCHITECTURE).read_text()
    for folder in FOLDERS:
        for path in sorted((ROOT / "psqlmessages" / folder).rglob("[!_]*.py")):
            name = path.relative_to(ROOT / "psqlmessages" / folder)
            if f"\n| `{name}` | " not in page:
                yield f"{ARCHITECTURE} has no row for {folder}/{name}"


def page_errors() -> Iterator[str]:
    """Yield an error for each long line outside tables, and for a gap in the decisions' numbers."""
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if len(line) > MAX_LINE and not line.startswith("|"):
                yield f"{path.relative_to(ROOT)}:{number}: a line of {len(line)} characters"
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs/adr").glob("*.md"))
    if numbers != list(range(1, len(numbers) + 1)):
        yield "docs/adr: the numbers of the decisions have a gap"


def main(arguments: list[str]) -> int:
    """Print the errors; return 1 if there are any."""
    prints = "--list" in arguments
    if paths := [Path(each) for each in arguments if each != "--list"]:
        print(f"{rate(paths, prints=prints):.1f} unusual constructions per 1,000 words")
        return 0
    errors = [*name_errors(), *unlisted_modules(), *page_errors()]
    rates = {name: rate([ROOT / name], prints=prints) for name in COUNTED}
    errors += [
        f"{name}: {found:.1f} unusual constructions per 1,000 words"
        for name, found in rates.items()
        if found >= LIMIT_PER_1000_WORDS
    ]
    print(*errors, sep="\n")
    return len(errors) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
