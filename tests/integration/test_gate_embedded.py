from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patchctl.admission.decision import REQUIRED_CHECKS, Decision
from patchctl.admission.embedded import EmbeddedEngine, WorkerLimits
from patchctl.admission.engine import EngineError
from patchctl.admission.gate import decide
from patchctl.admission.known_answers import KnownAnswer, load_known_answers
from patchctl.admission.policy import Module, PolicySet, load_default
from patchctl.admission.testing import run_rego_tests

LOOP = """package patchctl.gate

ones := [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]

decision := count([1 |
	some a in ones
	some b in ones
	some c in ones
	some d in ones
	some e in ones
	some f in ones
	some g in ones
	some h in ones
	some i in ones
	some j in ones
	a + (b + (c + (d + (e + (f + (g + (h + (i + j)))))))) == 0
])
"""
BOMB = 'package patchctl.gate\n\nx0 := "0123456789abcdef"\n\n{doublings}\n\ndecision := x40\n'.format(
    doublings="\n\n".join(f'x{index + 1} := concat("", [x{index}, x{index}])' for index in range(40)),
)


@pytest.fixture
def answer() -> KnownAnswer:
    return next(known for known in load_known_answers() if known.outcome == "allow")


@pytest.fixture
def policy(answer: KnownAnswer) -> PolicySet:
    return load_default().with_data(answer.settings)


@pytest.fixture
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(WorkerLimits(cpu_s=1, memory_bytes=256 << 20))
    yield made
    made.close()


def with_gate(policy: PolicySet, source: str) -> PolicySet:
    return replace(policy, modules=(Module("main.rego", source),))


def codes(decision: Decision) -> list[str]:
    assert decision.outcome == "deny"
    assert decision.passed == ()
    return [finding.id for finding in decision.denied]


def worker_pid(engine: EmbeddedEngine) -> int:
    assert engine._worker is not None
    return engine._worker.pid


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_rego_tests_pass() -> None:
    results = run_rego_tests(load_default())
    assert len(results) >= 35
    assert [result for result in results if not result.passed] == []


def test_rego_test_runner_reports_failures() -> None:
    source = 'package patchctl.bad_test\n\ntest_false if 1 == 2\n\ntest_text := "true"\n\ntest_true if 1 == 1\n'
    policy = replace(load_default(), tests=(Module("bad_test.rego", source),))
    assert [result.passed for result in run_rego_tests(policy)] == [False, False, True]


def test_required_checks_are_the_policys() -> None:
    engine = EmbeddedEngine()
    required = engine.evaluate(load_default(), b"{}", "data.patchctl.gate.required").value
    engine.close()
    assert set(required) == REQUIRED_CHECKS


def test_worker_stays_warm_and_ends_on_close(engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer) -> None:
    assert decide(answer.facts, policy, engine).outcome == "allow"
    pid = worker_pid(engine)
    assert decide(answer.facts, load_default(), engine).outcome == "deny"
    assert decide(answer.facts, policy, engine).outcome == "allow"
    assert worker_pid(engine) == pid
    engine.close()
    assert not alive(pid)


def test_decision_names_engine_and_digests(engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer) -> None:
    decision = decide(answer.facts, policy, engine)
    assert decision.engine == "embedded"
    assert decision.engine_version
    assert (decision.policy_digest, decision.data_digest) == (policy.policy_digest, policy.data_digest)
    assert decision.input_digest.startswith("sha256:")
    assert decision.took_ms > 0


def test_endless_policy_is_stopped_and_the_worker_replaced(
    engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer
) -> None:
    assert decide(answer.facts, policy, engine).outcome == "allow"
    pid = worker_pid(engine)
    assert codes(decide(answer.facts, with_gate(policy, LOOP), engine)) == ["gate.engine_timeout"]
    assert not alive(pid)
    assert decide(answer.facts, policy, engine).outcome == "allow"


def test_memory_bomb_is_stopped(engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer) -> None:
    (code,) = codes(decide(answer.facts, with_gate(policy, BOMB), engine))
    assert code in {"gate.engine_crashed", "gate.policy_failed"}
    assert decide(answer.facts, policy, engine).outcome == "allow"


def test_undefined_false_and_broken_policies_deny(
    engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer
) -> None:
    gate = "package patchctl.gate\n\n"
    for source, code in (
        (gate + "decision if input.nothing", "gate.result_undefined"),
        (gate + "decision := true", "gate.result_malformed"),
        (gate + 'decision := {"outcome": "allow", "denied": [], "held": [], "passed": []}', "gate.result_malformed"),
        (gate + "decision := unknown", "gate.policy_failed"),
        (gate + "decision := 1\n\ndecision := 2 if true", "gate.policy_failed"),
        (gate + "decision := 1 / 0", "gate.policy_failed"),
        (gate + "other := 1", "gate.policy_failed"),
        ("package", "gate.policy_failed"),
    ):
        assert codes(decide(answer.facts, with_gate(policy, source), engine)) == [code], source
    assert decide(answer.facts, policy, engine).outcome == "allow"


def fake_regorus(folder: Path, evaluate: str) -> None:
    """A ``regorus`` module whose evaluation runs ``evaluate``; found through PYTHONPATH before the real one."""
    (folder / "regorus.py").write_text(
        "import os, sys, time\n"
        "class Engine:\n"
        "    def add_policy(self, name, source): print('noise', flush=True)\n"
        "    def add_data_json(self, data): sys.stdout.write('x' * 100000); os.write(1, b'noise')\n"
        "    def eval_query(self, query): pass\n"
        "    def clone(self): return self\n"
        "    def set_input_json(self, text): os.write(2, b'noise')\n"
        f"    def eval_rule_as_json(self, query):\n        {evaluate}\n",
    )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_noise_on_stdout_reaches_nobody(fake: Path, engine: EmbeddedEngine, policy: PolicySet) -> None:
    fake_regorus(fake, "return '[1]'")
    assert engine.evaluate(policy, b"{}").value == [1]


@pytest.mark.parametrize(
    ("evaluate", "code"),
    [
        ("os._exit(0)", "gate.engine_crashed"),
        ("os.abort()", "gate.engine_crashed"),
        ("sys.exit(3)", "gate.policy_failed"),
        ("raise KeyboardInterrupt", "gate.policy_failed"),
        ("return 'no json'", "gate.policy_failed"),
        ("return '\"' + 'x' * (5 << 20) + '\"'", "gate.result_malformed"),
        ("while True: pass", "gate.engine_timeout"),
    ],
)
def test_every_way_to_fail_denies(
    fake: Path, engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer, evaluate: str, code: str
) -> None:
    fake_regorus(fake, evaluate)
    assert codes(decide(answer.facts, policy, engine)) == [code]


def test_a_worker_that_says_nothing_is_killed(fake: Path, policy: PolicySet) -> None:
    fake_regorus(fake, "time.sleep(1000)")
    engine = EmbeddedEngine(WorkerLimits(wall_s=1.0))
    with pytest.raises(EngineError) as caught:
        engine.evaluate(policy, b"{}")
    assert caught.value.code == "gate.engine_timeout"
    assert engine._worker is None


def test_kill_in_the_middle_of_an_evaluation(
    fake: Path, engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer
) -> None:
    marker = fake / "evaluating"
    fake_regorus(fake, f"open({str(marker)!r}, 'w').close(); time.sleep(1000)")
    decisions: list[Decision] = []
    deciding = threading.Thread(target=lambda: decisions.append(decide(answer.facts, policy, engine)))
    deciding.start()
    deadline = time.monotonic() + 20
    while not marker.exists() and time.monotonic() < deadline:
        deciding.join(0.01)
    os.kill(worker_pid(engine), signal.SIGKILL)
    deciding.join(20)
    assert codes(decisions[0]) == ["gate.engine_crashed"]
    assert "SIGKILL" in decisions[0].denied[0].message
    (fake / "regorus.py").unlink()
    assert decide(answer.facts, policy, engine).outcome == "allow"


def test_kill_between_two_evaluations(engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer) -> None:
    assert decide(answer.facts, policy, engine).outcome == "allow"
    os.kill(worker_pid(engine), signal.SIGKILL)
    assert codes(decide(answer.facts, policy, engine)) == ["gate.engine_crashed"]
    assert decide(answer.facts, policy, engine).outcome == "allow"


def test_a_missing_library_names_the_way_out(
    fake: Path, engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer
) -> None:
    (fake / "regorus.py").write_text("raise ModuleNotFoundError('regorus')\n")
    assert codes(decide(answer.facts, policy, engine)) == ["gate.engine_missing"]


def test_secrets_of_the_environment_stay_with_the_parent(
    fake: Path, engine: EmbeddedEngine, policy: PolicySet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    fake_regorus(fake, "import json; return json.dumps(sorted(os.environ))")
    assert "SECRET_TOKEN" not in engine.evaluate(policy, b"{}").value


def test_a_module_in_the_current_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EmbeddedEngine, policy: PolicySet, answer: KnownAnswer
) -> None:
    fake_regorus(tmp_path, "os._exit(7)")
    monkeypatch.chdir(tmp_path)
    assert decide(answer.facts, policy, engine).outcome == "allow"


def test_importing_the_gate_loads_no_engine() -> None:
    program = (
        "import sys, patchctl.admission.gate, patchctl.admission.select, patchctl.admission.log\n"
        "assert not {'regorus', 'opa_client', 'requests', 'torch'} & set(sys.modules), sys.modules\n"
    )
    import sys

    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
