from __future__ import annotations

import pytest

from patchctl.admission.lint import lint_module, package_of

HEADER = "package patchctl.site\n\nimport data.patchctl.lib.checks\n\n"


@pytest.mark.parametrize(
    "rule",
    [
        'x if input.a == "b"',
        "x if not y",
        'x := count({1} - {2})\n\n# not count(x) in a comment, "\\n" neither',
        'm := sprintf("%s has %d, not count(1)", ["a", 1])',
        'results contains checks.pass("id", "text")',
        "f(a) := a + 1\n\ny := f(2)",
        "x if {\n\tnot y\n\tinput.a < 3\n}",
        "x if { not y }",
        "y if (1 == 1)",
    ],
)
def test_accepts_the_portable_core(rule: str) -> None:
    assert lint_module(HEADER + rule) == []


@pytest.mark.parametrize(
    "rule",
    [
        "x if not count(input.a) == 0",
        "x if not input.a in input.b",
        "x if not checks.pass(input.a, 1)",
        "x if not input.a == 1",
        "x if {\n\tnot input.a > 1\n}",
        'x if http.send({"url": "http://a"}).status_code == 200',
        "x := opa.runtime()",
        "x := time.now_ns()",
        'x if regex.match("a", input.a)',
        'x if startswith(input.a, "a")',
        "x := json.patch(input, [])",
        "x := other.f(1)",
        "x := input.a / 2",
        "x := input.a % 2",
        "x := input.a * 2",
        "x if input.a = 1",
        "x := 1 if y\n\nelse := 2",
        "x { input.a == 1 }",
        "f(a) { a == 1 }",
        "x := `raw`",
        'x if input.a == "\\u0000"',
        'x := sprintf("%v", [1])',
        'x := sprintf("%s %.3f", [1])',
        "x if y with input.a as 1",
        "x if data.other.y",
        "x := data",
        "x := data[input.a]",
        "x := 1 ~ 2",
        'x := "unclosed',
        "import input.a",
        "import data.patchctl.lib.checks as other",
        "import rego.v1",
    ],
)
def test_refuses_what_engines_read_differently(rule: str) -> None:
    assert lint_module(HEADER + rule)


def test_names_the_line() -> None:
    assert [finding.line for finding in lint_module(HEADER + "x if y\n\nz := time.now_ns()")] == [7]


@pytest.mark.parametrize("source", ["x := 1", "package a.b\npackage a.c", "package a[1]", ""])
def test_needs_exactly_one_package(source: str) -> None:
    assert lint_module(source)


def test_tests_may_replace_facts() -> None:
    source = "package patchctl.site_test\n\ntest_a if data.patchctl.site.x with input as json.patch({}, [])"
    assert lint_module(source, test=True) == []
    assert lint_module(source)


def test_package_path() -> None:
    assert package_of("# c\npackage a.b_c\n") == ("a", "b_c")
    assert package_of("x := 1") == ()
