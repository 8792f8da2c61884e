"""The folder by which the driver tells its data source which exchanges are to run."""

from __future__ import annotations

from pathlib import Path


class Folder:
    """Numbered editions of the definitions, and which of them has been taken over.

    Spark keeps the source of a stream in a process of its own beside the driver, and its options
    are what they were when the stream began.
    """

    def __init__(self, path: Path) -> None:
        self._definitions = path / "definitions"
        self._taken_over = path / "taken-over"

    def put(self, edition: int, text: str) -> None:
        """Publish an edition."""
        _write(self._definitions, f"{edition}\n{text}")

    def get(self) -> tuple[int, str]:
        """Return the last edition: its number, and its text."""
        number, _, text = self._definitions.read_text(encoding="utf-8").partition("\n")
        return int(number), text

    def take_over(self, edition: int) -> None:
        """Tell that no work goes on by an earlier edition."""
        _write(self._taken_over, str(edition))

    @property
    def taken_over(self) -> int:
        """The last edition of which that is so; 0 for none."""
        try:
            return int(self._taken_over.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0


def _write(path: Path, text: str) -> None:
    # Whoever reads meanwhile gets the former text, or this one.
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
