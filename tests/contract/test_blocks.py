"""Each block of code of the documentation has a test that runs it, or a reason: blocks.txt."""

import ast
import re
import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path
from textwrap import dedent

from django.core.management import load_command_class
from django.template import Template

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# Up to a comment, a pipe or the end of the line. Quoted text may have several lines.
COMMAND = re.compile(r"""(?m)(?:^|^\$ |\.py |/)psqlmessages ((?:"[^"]*"|'[^']*'|[^"'\n#|<>;])*)""")


def blocks(*languages: str) -> list[tuple[str, str, str]]:
    """Return page, language and text of the blocks in some languages, or of all."""
    found = []
    for page in PAGES:
        for _, language, text in BLOCK.findall(page.read_text()):
            file = " file" if language == "python" and re.match(r"# \S+\.py\n", text) else ""
            name = page.relative_to(ROOT).as_posix()
            found.append((name, f"{language or 'plain'}{file}", dedent(text)))
    return [each for each in found if not languages or each[1] in languages]


def test_each_block_has_a_runner_or_a_reason():
    found = Counter((page, language) for page, language, _ in blocks())
    planned: Counter[tuple[str, str]] = Counter()
    for section in Path(__file__).with_name("blocks.txt").read_text().split("\n== ")[1:]:
        runner, *lines = section.strip().split("\n")
        kind, _, test = runner.rpartition(": ")
        path, _, name = test.partition("::")
        source = "" if kind == "no" else (ROOT / path).read_text()
        assert kind == "no" or f"def {name}(" in source, runner
        for page, languages in (line.split(": ", 1) for line in lines):
            is_named = re.search(rf'["/]{Path(page).stem}[".]', source) is not None
            assert is_named or kind in ("no", "all"), f"{path} does not name {page}"
            for language, number in re.findall(r"([^,]+?)(?: (\d+))?(?:, |$)", languages):
                planned[page, language] += int(number or found[page, language] or 1)
    assert planned == found


def test_code_compiles_and_finds_what_it_imports():
    for page, _, text in blocks("python", "python file"):
        tree = compile(text, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("psqlmessages"):
                module = import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
    for *_, text in blocks("django", "html"):
        for file in re.findall(r"{% \w+ .((?:admin/)?psqlmessages/\S+). %}", Template(text).source):
            assert any((ROOT / "psqlmessages").glob(f"*/{file}")), file


def test_the_command_line_accepts_each_documented_command():
    parser = load_command_class("psqlmessages", "psqlmessages").create_parser("", "psqlmessages")
    parser.add_argument("--dsn")  # of the console script
    accepted = set()
    for page, _, text in blocks("console", 'ini title="crontab"'):
        if not page.endswith("/commands.md"):  # the options there are compared with the parser
            for command in COMMAND.findall(re.sub(r"\\?\n {4}", " ", text)):
                parser.parse_args(shlex.split(re.sub(r"[][]", "", command)))
                accepted.add(page)
    assert len(accepted) > 10
