"""Mutants of SQL functions: each lacks one condition, call or mode that the function asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"--[^\n]*|'(?:[^']|'')*'|\$(\w*)\$(?:.|\n)*?\$\1\$|\w+|[()\[\];,]|<>|[<>!=]=|:=|\S"
)
CONDITION = {"WHERE", "IF", "ELSIF", "ON", "WHEN", "HAVING"}
BRANCH = {"IF", "ELSIF", "WHEN"}
END = CONDITION | {
    "THEN", "ELSE", "END", "LOOP", "GROUP", "ORDER", "LIMIT", "OFFSET", "FOR", "RETURNING",
    "UNION", "EXCEPT", "INTERSECT", "JOIN", "LEFT", "CROSS", "INTO", "FROM", "SELECT", "WINDOW",
    ";", ",", ")", "]",
}  # fmt: skip
# `DROP ... IF EXISTS name` and the like; behind EXCEPTION, WHEN names an error.
NO_CONDITION = re.compile(r"IF (NOT )?EXISTS \w|ON (CONFLICT|DELETE|UPDATE)\b")
ERROR = re.compile(r"WHEN (SQLSTATE|[a-z_]+( OR [a-z_]+)*\s+THEN)")
NEUTRAL = {"AND": "true", "OR": "false"}
MODES = {"'R'": "'W'", "'W'": "'R'", "'RW'": "'R'", "'{R,RW}'": "'{W,RW}'", "'{W,RW}'": "'{R,RW}'"}


@dataclass(frozen=True)
class Mutant:
    """A function's source with the condition from `start` to `end` replaced by a constant."""

    function: str
    source: str
    start: int
    end: int
    constant: str

    @property
    def name(self) -> str:
        """What was replaced, and by what: the same as long as the condition is."""
        condition = re.sub(r"--[^\n]*", "", self.source[self.start : self.end])
        before = self.source[: self.start].count(self.source[self.start : self.end])
        number = f" #{before + 1}" if before else ""
        return " ".join(f"{self.function}: {condition}{number} -> {self.constant}".split())

    @property
    def mutated(self) -> str:
        return f"{self.source[: self.start]} {self.constant} {self.source[self.end :]}"


def mutants(function: str, source: str) -> Iterator[Mutant]:
    begin, end = source.find("$function$") + len("$function$"), source.rfind("$function$")
    if end < begin:  # a view
        begin, end = 0, len(source)
    tokens = [each for each in TOKEN.finditer(source, begin, end) if each.group()[:2] != "--"]
    words = [match.group().upper() for match in tokens]
    made = {
        (tokens[first].start(), tokens[last].end(), constant)
        for index in range(len(words))
        for first, last, constant in _replacements(source, tokens, words, index)
    }
    for start, end, constant in sorted(made):
        yield Mutant(function, source, start, end, constant)


def _replacements(
    source: str, tokens: list[re.Match[str]], words: list[str], index: int
) -> Iterator[tuple[int, int, str]]:
    """What may be replaced from a token on: first and last token, and the constant."""
    word, rest = words[index], source[tokens[index].start() :][:300]
    if word in MODES:
        yield index, index, MODES[word]
    elif word == "PERFORM" and words[index - 1] in ("BEGIN", ";", "THEN", "ELSE", "LOOP"):
        yield index, words.index(";", index) - 1, "NULL"
    elif re.fullmatch(r"\w+_ERROR", word) and (words[index - 1], words[index + 1]) == (".", "("):
        yield index - 2, _closing(words, index + 1), "NULL"
    elif word in ("AND", "OR") and not _is_range(words, index):
        last = _operand(words, index)
        if last > index + 1 or (last > index and words[last][0] != "'"):
            yield index + 1, last, NEUTRAL[word]
    elif word in CONDITION and not (NO_CONDITION.match(rest.upper()) or ERROR.match(rest)):
        whole, first, joined = _condition(words, index)
        if whole > index and (word in BRANCH or joined is None):
            yield index + 1, whole, "false" if word in BRANCH else "true"
        if first > index and joined is not None:
            yield index + 1, first, NEUTRAL[joined]


def _closing(words: list[str], index: int) -> int:
    """The token that closes the parenthesis at a place."""
    depth = 0
    for place in range(index, len(words)):
        depth += (words[place] == "(") - (words[place] == ")")
        if depth == 0:
            return place
    raise ValueError("a parenthesis that is not closed")


def _operand(words: list[str], index: int) -> int:
    """The last token of the operand that follows a token."""
    depth, ranges = 0, 0
    for place in range(index + 1, len(words)):
        word = words[place]
        if depth == 0:
            if word == "BETWEEN":
                ranges += 1
            elif word == "AND" and ranges:
                ranges -= 1
            elif word == "CASE":
                depth += 1
                continue
            elif word in ("AND", "OR") or (word in END and not _is_call(words, place)):
                return place - 1
        if word in ("(", "[", "CASE"):
            depth += 1
        elif word in (")", "]") or (word == "END" and depth):
            depth -= 1
    return len(words) - 1


def _condition(words: list[str], index: int) -> tuple[int, int, str | None]:
    """The last token of a whole condition, that of its first operand, and what joins these."""
    first = last = _operand(words, index)
    joined = next((word for word in words[first + 1 : first + 2] if word in NEUTRAL), None)
    while last + 1 < len(words) and words[last + 1] in ("AND", "OR"):
        last = _operand(words, last + 1)
    return last, first, joined


def _is_call(words: list[str], place: int) -> bool:
    """Whether a word that could end a condition is a function's name, or part of DISTINCT FROM."""
    following = words[place + 1] if place + 1 < len(words) else ""
    if words[place] == "FROM":
        return words[place - 1] == "DISTINCT"
    return words[place] in ("LEFT", "RIGHT") and following == "("


def _is_range(words: list[str], index: int) -> bool:
    """Whether an AND belongs to BETWEEN."""
    depth = 0
    for place in range(index - 1, -1, -1):
        word = words[place]
        if word in (")", "]"):
            depth += 1
        elif word in ("(", "["):
            if depth == 0:
                return False
            depth -= 1
        elif depth == 0:
            if word == "BETWEEN":
                return True
            if word in ("AND", "OR") or word in END:
                return False
    return False
