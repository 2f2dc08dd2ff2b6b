"""The same policy on a real OPA 1.x server, through opa-python-client; skipped where no ``opa`` is on PATH."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import pytest
import requests
from opa_client.opa import OpaClient

from patchctl.admission.decision import Answer, read_answer
from patchctl.admission.embedded import EmbeddedEngine
from patchctl.admission.engine import EngineError
from patchctl.admission.facts import encode_input
from patchctl.admission.gate import decide
from patchctl.admission.known_answers import KnownAnswer, load_known_answers
from patchctl.admission.opa_server import OpaServerEngine
from patchctl.admission.policy import Module, PolicySet, load_default
from patchctl.admission.testing import run_rego_tests

OPA = shutil.which("opa")
needs_opa = pytest.mark.skipif(OPA is None, reason="no opa binary on PATH")
ANSWERS = load_known_answers()
ALLOWED = ANSWERS[0]
DENIED = next(known for known in ANSWERS if known.name == "files differ")
POLICY = load_default().with_data(ALLOWED.settings)
FUZZ_CASES = 800
QUERY = {"strict-builtin-errors": "true"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    assert OPA is not None
    port = free_port()
    process = subprocess.Popen(
        [OPA, "run", "--server", "--addr", f"127.0.0.1:{port}", "--disable-telemetry", "--log-level", "error"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = OpaClient(host="127.0.0.1", port=port, retries=0)
        client._session.trust_env = False
        client.wait_for_ready(timeout=30, interval=0.05)
        client.close_connection()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def engine(server: str) -> Iterator[OpaServerEngine]:
    made = OpaServerEngine(server)
    yield made
    made.close()


def put(engine: OpaServerEngine, policy_id: str, source: str) -> None:
    engine._client.update_policy_from_string(source, policy_id, rego_compat=False)


@needs_opa
def test_opa_accepts_and_tests_the_folder() -> None:
    assert OPA is not None
    folder = str(files("policies"))
    subprocess.run([OPA, "check", "--strict", "--bundle", folder], check=True, timeout=60)
    tested = subprocess.run([OPA, "test", "--bundle", folder], check=True, timeout=60, capture_output=True, text=True)
    count = len(run_rego_tests(load_default()))
    assert f"PASS: {count}/{count}" in tested.stdout
    listed = subprocess.run([OPA, "fmt", "--list", folder], check=True, timeout=60, capture_output=True, text=True)
    assert listed.stdout == ""


@needs_opa
def test_known_answers(engine: OpaServerEngine) -> None:
    for known in sorted(ANSWERS, key=lambda known: json.dumps(known.settings)):
        decision = decide(known.facts, load_default().with_data(known.settings), engine)
        assert known.matches(decision), (known.name, decision)
    assert (decision.engine, decision.engine_version.split(".")[0]) == ("server", "1")


@needs_opa
def test_proxy_variables_are_ignored(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    engine = OpaServerEngine(server)
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"
    engine.close()


@needs_opa
def test_altered_rules_and_data_are_put_right_before_the_decision(engine: OpaServerEngine) -> None:
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"
    main = next(module for module in POLICY.modules if module.name == "main.rego")
    put(engine, "patchctl/main.rego", main.source.replace('default outcome := "deny"', 'default outcome := "allow"'))
    engine._client.update_or_create_data({"declaration_partial": "pass"}, "patchctl/config")
    assert decide(DENIED.facts, POLICY, engine).outcome == "deny"
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"
    put(engine, "patchctl/left-over.rego", "package patchctl.gate\n\nextra := 1\n")
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"
    assert "patchctl/left-over.rego" not in engine._client.get_policies_list()


@needs_opa
def test_a_foreign_module_in_our_package_denies(engine: OpaServerEngine) -> None:
    put(engine, "someone-else", "package patchctl.gate\n\nextra := 1\n")
    try:
        decision = decide(ALLOWED.facts, POLICY, engine)
        assert [finding.id for finding in decision.denied] == ["gate.policy_mismatch"]
        assert "someone-else" in decision.denied[0].message
    finally:
        engine._client.delete_policy("someone-else")
    put(engine, "neighbour", "package patchctlother.gate\n\nextra := 1\n")
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"
    engine._client.delete_policy("neighbour")


@needs_opa
def test_a_change_during_the_evaluation_denies(engine: OpaServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = engine._client.query_rule

    def change_then_ask(*args: Any, **kwargs: Any) -> Any:
        engine._client.update_or_create_data({"clock_skew_s": 1}, "patchctl/config")
        return ask(*args, **kwargs)

    monkeypatch.setattr(engine._client, "query_rule", change_then_ask)
    decision = decide(ALLOWED.facts, POLICY, engine)
    assert [finding.id for finding in decision.denied] == ["gate.policy_mismatch"]


@needs_opa
def test_undefined_old_syntax_and_builtin_errors_deny(engine: OpaServerEngine) -> None:
    for source, code in (
        ("package patchctl.gate\n\ndecision if input.nothing", "gate.result_undefined"),
        ("package patchctl.gate\n\nother := 1", "gate.result_undefined"),
        ("package patchctl.gate\n\ndecision { true }", "gate.policy_failed"),
        ("package patchctl.gate\n\ndecision := 1 / 0", "gate.policy_failed"),
        ("package patchctl.gate\n\ndecision := true", "gate.result_malformed"),
    ):
        policy = replace(POLICY, modules=(Module("main.rego", source),))
        decision = decide(ALLOWED.facts, policy, engine)
        assert [finding.id for finding in decision.denied] == [code], (source, decision)
    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"


STRINGS = [
    "",
    "public",
    "local",
    "stable",
    "fix-8",
    "fix-9",
    "é",
    "e\u0301",
    'a"b',
    "a\\b",
    "%s%d",
    "\U0001f600",
    "null",
    "apply",
]
INTEGERS = [0, 1, 8, 9, 10, 1799990000, 1800000000, 1800000300, 1800000301, 1800090000, 2**53 - 1]
ENUMS = sorted(
    {
        value
        for known in ANSWERS
        for group in json.loads(encode_input(known.facts)).values()
        for value in group.values()
        if isinstance(value, str)
    },
)
HOSTILE = [None, True, False, -1, [], {}, [None], {"a": 1}, "verified\u0000", *STRINGS, *ENUMS]


def mutated(rng: random.Random, known: KnownAnswer, *, hostile: bool) -> dict[str, Any]:
    """The vector's input with up to four facts replaced, of the same type unless ``hostile``, or removed."""
    document: dict[str, Any] = json.loads(encode_input(known.facts))
    for _ in range(rng.randint(0, 4)):
        group = document[rng.choice(sorted(document))]
        if not group:
            continue
        field = rng.choice(sorted(group))
        if hostile:
            if rng.random() < 0.3:
                del group[field]
            else:
                group[field] = rng.choice(HOSTILE)
        elif isinstance(group[field], int):
            group[field] = rng.choice(INTEGERS)
        elif isinstance(group[field], list):
            group[field] = rng.sample(ENUMS, rng.randint(0, 3))
        else:
            group[field] = rng.choice(ENUMS + STRINGS)
    return document


def said(evaluate: Callable[[dict[str, Any]], Any], document: dict[str, Any]) -> Answer | None:
    """The engine's answer, or None when it reports an error."""
    try:
        return read_answer(evaluate(document))
    except (EngineError, requests.HTTPError):
        return None


def ids_of(answer: Answer) -> list[list[str]]:
    return [[finding.id for finding in findings] for findings in (answer.denied, answer.held, answer.passed)]


@needs_opa
@pytest.mark.parametrize("hostile", [False, True], ids=["typed", "hostile"])
def test_both_engines_agree(engine: OpaServerEngine, hostile: bool) -> None:
    rng = random.Random(20261130 + hostile)  # noqa: S311 - a reproducible stream, no secret

    embedded = EmbeddedEngine()

    def ask(document: dict[str, Any]) -> Any:
        return engine._client.query_rule(document, "patchctl.gate", "decision", query_params=QUERY)["result"]

    def compute(document: dict[str, Any]) -> Any:
        return embedded.evaluate(POLICY, json.dumps(document).encode()).value

    assert decide(ALLOWED.facts, POLICY, engine).outcome == "allow"  # uploads the policy
    allowed = 0
    try:
        for _ in range(FUZZ_CASES):
            document = mutated(rng, rng.choice(ANSWERS), hostile=hostile)
            theirs, ours = said(ask, document), said(compute, document)
            if theirs is None or ours is None:  # an error is a deny; only ill-typed input may be one
                assert hostile
                assert {answer.outcome for answer in (theirs, ours) if answer} <= {"deny"}, json.dumps(document)
            else:
                assert ids_of(ours) == ids_of(theirs), json.dumps(document)
                assert hostile or ours == theirs, json.dumps(document)  # they print ill-typed values differently
                allowed += ours.outcome == "allow"
    finally:
        embedded.close()
    assert 0 < allowed < FUZZ_CASES // 2


class _Redirects(BaseHTTPRequestHandler):
    """Sends every request to the real server: what a captured port would do."""

    destination = ""

    def do_GET(self) -> None:
        self.send_response(307)
        self.send_header("Location", self.destination + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - names that the base class dispatches to

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@needs_opa
def test_a_redirect_to_another_server_is_not_followed(server: str) -> None:
    handler = type("_ToServer", (_Redirects,), {"destination": server})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as redirecting:
        thread = threading.Thread(target=redirecting.serve_forever)
        thread.start()
        try:
            engine = OpaServerEngine(f"http://127.0.0.1:{redirecting.server_address[1]}")
            decision = decide(ALLOWED.facts, POLICY, engine)
            engine.close()
        finally:
            redirecting.shutdown()
            thread.join()
    assert [finding.id for finding in decision.denied] == ["gate.engine_unreachable"]


def test_a_server_that_is_down_denies_and_names_the_way_out() -> None:
    engine = OpaServerEngine(f"http://127.0.0.1:{free_port()}")
    decision = decide(ALLOWED.facts, POLICY, engine)
    assert [finding.id for finding in decision.denied] == ["gate.engine_unreachable"]
    assert "PATCHCTL_OPA_URL" in decision.denied[0].message
    engine.close()


def test_a_server_that_says_nothing_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        engine = OpaServerEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        started = time.monotonic()
        with pytest.raises(EngineError) as caught:
            engine.evaluate(POLICY, b"{}")
        assert caught.value.code == "gate.engine_timeout"
        assert time.monotonic() - started < 30
        engine.close()


def test_policies_that_only_differ_in_data_differ_on_the_server_too() -> None:
    other: PolicySet = POLICY.with_data({"clock_skew_s": 1})
    assert other.revision != POLICY.revision
