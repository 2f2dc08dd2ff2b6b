"""Portability lint: refuses Rego on which OPA and the embedded engine differ, or that turns "unknown" into "fine".

Found by differential trials: ``not x in set`` with ``x`` undefined is true, so a missing fact passes;
builtins outside a small core differ between engines or depend on time and network; a rule may write to
``data`` and ``input`` names. What is left is small enough that both engines agree on every fuzzed input.
Pure; a lexer and a few token rules, not a parser: the engines parse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

# Deterministic, total on the types our schema admits, and equal in OPA 1.x and regorus.
PORTABLE_BUILTINS = frozenset({"count", "concat", "is_array", "is_number", "is_string", "sprintf", "json.patch"})
TEST_ONLY_BUILTINS = frozenset({"json.patch"})
# sprintf verbs on which the engines agree for strings and integers.
_PORTABLE_VERBS = re.compile(r"%(?![sd])")
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<raw>`)|(?P<newline>\n)|(?P<space>[ \t\r]+)"""
    r"""|(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)|(?P<number>[0-9]+)"""
    r"""|(?P<operator>:=|==|!=|<=|>=|[-+*/%<>=|&{}()\[\],.:;])|(?P<other>.)""",
)
# "if (" and the like are grouping, not calls.
_KEYWORDS = frozenset({"if", "not", "in", "some", "every", "contains", "with", "as", "else", "default", "import"})
_PACKAGE = re.compile(r"^package ([a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*)$", re.MULTILINE)
_DEFINED_FUNCTION = re.compile(r"^([a-z_][a-z0-9_]*)\(", re.MULTILINE)
_IMPORT = re.compile(r"^import (data\.[a-z0-9_.]+)$", re.MULTILINE)
_BODY_WITHOUT_IF = re.compile(r"^(?!package|import)[a-z_][\w.]*(?:\([^)]*\)|\[[^\]]*\])?\s*\{", re.MULTILINE)
_FORBIDDEN_TOKENS = {
    "/": "division fails or makes fractions",
    "%": "remainder fails on zero",
    "*": "products may leave the exact integers",
    "=": "use := or ==, unification hides mistakes",
    "else": "order-dependent; write exclusive conditions",
    "walk": "not on the portable list",
}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One refusal: 1-based line and what to change."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def package_of(source: str) -> tuple[str, ...]:
    """The module's package path, or () when it has none."""
    found = _PACKAGE.search(source)
    return tuple(found.group(1).split(".")) if found else ()


def _lex(source: str) -> list[_Token]:
    tokens, line = [], 1
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or "other"
        if kind == "newline":
            line += 1
        elif kind not in ("space", "comment"):
            tokens.append(_Token(kind, match.group(), line))
    return tokens


def _call_findings(tokens: list[_Token], source: str, allowed: frozenset[str]) -> list[LintFinding]:
    own = frozenset(_DEFINED_FUNCTION.findall(source)) | _KEYWORDS
    imported = {path.rsplit(".", 1)[-1] for path in _IMPORT.findall(source)}
    return [
        LintFinding(name.line, f"call of {name.text}: not on the portable list")
        for name, bracket in pairwise(tokens)
        if (name.kind, bracket.text) == ("name", "(")
        and name.text not in allowed | own
        and not (name.text.count(".") == 1 and name.text.split(".")[0] in imported)
    ]


def _negation_findings(tokens: list[_Token]) -> list[LintFinding]:
    """``not`` is safe before one plain reference; before a call or a membership it passes on an undefined fact."""
    found = []
    for index, token in enumerate(tokens):
        if token.text != "not" or token.kind != "name":
            continue
        rest = [after.text for after in tokens[index + 1 :] if after.line == token.line]
        if len(rest) != 1 and rest[1:2] != ["}"]:
            found.append(LintFinding(token.line, "negate one plain rule name only: an undefined operand would pass"))
    return found


def _token_findings(tokens: list[_Token], *, test: bool) -> list[LintFinding]:
    found = []
    for index, token in enumerate(tokens):
        if token.kind in ("raw", "other"):
            found.append(LintFinding(token.line, f"{token.text!r} is not portable here"))
        elif token.kind == "string":
            if "\\" in token.text:
                found.append(LintFinding(token.line, "escape in a string"))
            if index >= 2 and tokens[index - 2].text == "sprintf" and _PORTABLE_VERBS.search(token.text):  # noqa: PLR2004 - "sprintf", "("
                found.append(LintFinding(token.line, "sprintf verb other than %s and %d"))
        elif token.text in _FORBIDDEN_TOKENS:
            found.append(LintFinding(token.line, f"{token.text}: {_FORBIDDEN_TOKENS[token.text]}"))
        elif token.text.split(".")[0] == "data" and not token.text.startswith("data.patchctl."):
            found.append(LintFinding(token.line, "refer to data.patchctl.* only, by name"))
        elif token.text == "with" and not test:
            found.append(LintFinding(token.line, "with: only tests may replace facts"))
    return found


def lint_module(source: str, *, test: bool = False) -> list[LintFinding]:
    """Findings for one module, sorted by line; ``test`` permits what only tests need (``with``, ``json.patch``)."""
    tokens = _lex(source)
    found = _token_findings(tokens, test=test) + _negation_findings(tokens)
    found += _call_findings(tokens, source, PORTABLE_BUILTINS if test else PORTABLE_BUILTINS - TEST_ONLY_BUILTINS)
    if len(_PACKAGE.findall(source)) != 1:
        found.append(LintFinding(1, "exactly one line `package a.b` is needed"))
    imports = [token for token in tokens if token.text == "import"]
    if len(imports) != len(_IMPORT.findall(source)):
        found.append(LintFinding(imports[0].line, "import only data.*, without alias"))
    found += [
        LintFinding(source.count("\n", 0, match.start()) + 1, "rule body without if")
        for match in _BODY_WITHOUT_IF.finditer(source)
    ]
    return sorted(found, key=lambda finding: finding.line)
