"""Test each combination of Python and Django that Django allows: `make matrix`, or `nox -l`.

A Python that is not installed is skipped.
"""

import nox

nox.options.default_venv_backend = "venv"

COMBINATIONS = [
    ("3.11", "5.2"), ("3.12", "5.2"), ("3.13", "5.2"), ("3.14", "5.2"),
    ("3.12", "6.0"), ("3.13", "6.0"), ("3.14", "6.0"),
    ("3.12", "6.1"), ("3.13", "6.1"), ("3.14", "6.1"),
]  # fmt: skip
DJANGO_TESTS = ("tests/django", "tests/contract", "tests/rest", "tests/web")


@nox.session
@nox.parametrize("python,django", COMBINATIONS, ids=["-".join(each) for each in COMBINATIONS])
def tests(session: nox.Session, django: str) -> None:
    """Run the tests that use Django, or those given after `--`."""
    for name in ("requirements", "requirements-docs", "requirements-test"):
        session.install("-r", f"{name}.txt")
    session.install(f"django=={django}.*")
    session.install("--no-deps", "--editable", ".")
    session.run("pytest", "-n", "2", "--dist", "loadfile", *(session.posargs or DJANGO_TESTS))
