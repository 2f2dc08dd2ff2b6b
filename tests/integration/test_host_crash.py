"""kill -9 of every process of a host, idle, under load, and at every point of a transaction.

Whatever dies, the host serves the committed build again, the other process never noticed, and nobody
waits for an answer that does not come.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from patchctl.agent.testing import (
    POISON,
    POISONED,
    UNLOADABLE,
    HostKit,
    RunningHost,
    children,
    make_kit,
    sockets,
    until,
)
from patchctl.demo.clients import StreamingClients
from patchctl.demo.commands import Result
from patchctl.errors import ExitCode

# After a lost process is noticed, no response that was open then may stay open longer.
_END_S_MAX = 20.0


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> HostKit:
    return make_kit(tmp_path_factory.mktemp("kit"))


class Faulty:
    """A host whose faults are armed one at a time; deploys run beside the test."""

    def __init__(self, kit: HostKit, host: RunningHost, fault: Path) -> None:
        self.kit = kit
        self.host = host
        self._fault = fault
        self._patches: dict[str, Path] = {}

    def patch(self, version: str) -> Path:
        if version not in self._patches:
            self._patches[version] = self.kit.patch("1.0.0", version, sequence=1)
        return self._patches[version]

    @contextmanager
    def fault(self, armed: str) -> Iterator[None]:
        self._fault.write_text(armed)
        try:
            yield
        finally:
            self._fault.unlink()

    def fails(self, expect: ExitCode, version: str = "1.0.1") -> Result:
        """A deploy that ends as expected, with the host serving what it served, by the processes it names."""
        result = self.host.deploy(self.patch(version), expect=expect)
        self.check_whole()
        return result

    def check_whole(self) -> None:
        until(lambda: self.host.serves("1.0.0"))
        status = self.host.ask()
        assert status["transaction"] is None
        assert set(status["processes"]) == {"front", "engine"}
        assert [g["version"] for g in status["generations"] if g["state"] == "committed"] == ["1.0.0"]
        assert all(g["state"] in ("committed", "rolled-back", "discarded") for g in status["generations"])
        assert len(children(self.host.process.pid, "patchctl.agent")) == 2


@pytest.fixture(scope="module")
def faulty(kit: HostKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    fault = tmp_path_factory.mktemp("fault") / "armed"
    with kit.host("--bake-s", "2", "--restarts-max", "30", PATCHCTL_FAULT=f"@{fault}") as host:
        yield Faulty(kit, host, fault)


@contextmanager
def knocking(url: str) -> Iterator[list[str]]:
    """Connect all the time, as a load balancer's probe does; yields the refusals."""
    name, _, port = url.removeprefix("http://").rpartition(":")
    refused: list[str] = []
    stop = threading.Event()

    def knock() -> None:
        while not stop.wait(0.02):
            try:
                socket.create_connection((name, int(port)), timeout=5).close()
            except OSError as error:
                refused.append(str(error))

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    try:
        yield refused
    finally:
        stop.set()
        thread.join()


def wait_for_ends(clients: StreamingClients) -> None:
    """Every response that is open now ends, well or with an error its client sees."""
    open_now = [one for one in clients.responses if one.generations is None and not one.failure]
    until(lambda: all(one.generations is not None or one.failure for one in open_now), _END_S_MAX)


def answer(host: RunningHost, content: str = "hello") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(host.ready["url"] + "/v1/chat/completions", json=body, timeout=60)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def page(host: RunningHost) -> str:
    return httpx.get(host.ready["url"] + "/metrics", timeout=5).text


@pytest.mark.parametrize("load", [0, 2])
def test_each_process_outlives_the_other(faulty: Faulty, load: int) -> None:
    host = faulty.host
    before, restarts = sockets(host.process.pid), host.ask()["restarts"]
    with knocking(host.ready["url"]) as refused, host.traffic(load) as clients:
        for role, other in (("engine", "front"), ("front", "engine")):
            until(lambda: sum(1 for one in clients.responses if one.arrivals_ns) >= load)
            pids, done = host.pids, len(clients.finished)
            host.kill(role)
            wait_for_ends(clients)
            until(lambda: host.pids.get(role, pids[role]) != pids[role] and host.serves("1.0.0"))  # noqa: B023
            assert host.pids[other] == pids[other]
            assert answer(host).status_code == httpx.codes.OK
            until(lambda: sum(1 for one in clients.finished[done:] if not one.failure) >= load)  # noqa: B023
    assert {role: count - restarts[role] for role, count in host.ask()["restarts"].items()} == {"front": 1, "engine": 1}
    assert refused == []
    until(lambda: sockets(host.process.pid) == before)
    faulty.check_whole()


@pytest.mark.parametrize("role", ["engine", "front"])
def test_a_request_in_flight_ends_with_an_error_its_client_sees(faulty: Faulty, role: str) -> None:
    host = faulty.host
    engine = host.pids["engine"]
    os.kill(engine, signal.SIGSTOP)  # so that the request is still there when its process dies
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, host)
        until(lambda: "num_requests_waiting 1" in page(host))
        host.kill(role)
        if role == "engine":
            told = asked.result(timeout=_END_S_MAX)
            assert told.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            assert "engine_link_lost" in told.text
        else:
            os.kill(engine, signal.SIGCONT)
            with pytest.raises(httpx.TransportError):
                asked.result(timeout=_END_S_MAX)
    faulty.check_whole()


def test_a_request_made_while_the_front_is_replaced_is_not_turned_away(faulty: Faulty) -> None:
    """Its connection waits in the agent's socket for the next front, which may only ask to try again."""
    faulty.host.kill("front")
    while (told := answer(faulty.host)).status_code == httpx.codes.SERVICE_UNAVAILABLE:
        time.sleep(float(told.headers["retry-after"]))
    assert told.status_code == httpx.codes.OK
    faulty.check_whole()


def test_kill_9_of_the_stager_changes_nothing(faulty: Faulty) -> None:
    pids = faulty.host.pids
    with ThreadPoolExecutor(1) as pool:
        deploy = pool.submit(faulty.fails, ExitCode.INTERNAL)
        until(lambda: bool(children(faulty.host.process.pid, "patchctl.agent.stager")))
        (stager,) = children(faulty.host.process.pid, "patchctl.agent.stager")
        os.kill(stager, signal.SIGKILL)
        error = deploy.result().error
    assert error is not None
    assert error["code"] == "stage.crashed"
    assert faulty.host.newest()["state"] == "failed"
    assert faulty.host.pids == pids


def test_a_front_that_refuses_the_build_leaves_the_engine_alone(faulty: Faulty) -> None:
    pids = faulty.host.pids
    error = faulty.fails(ExitCode.INTERNAL, UNLOADABLE).error
    assert error is not None
    assert error["code"] == "front.build_refused"
    assert faulty.host.pids == pids


@pytest.mark.parametrize("role", ["engine", "front"])
def test_kill_9_while_staging(faulty: Faulty, role: str) -> None:
    """Half staged: the front has the new build, the engine not yet."""
    with faulty.fault(f"host.stage.half=KILL:{role}"):
        error = faulty.fails(ExitCode.INTERNAL).error
    assert error is not None
    assert error["code"] in ("host.process_gone", "host.process_lost")
    record = faulty.host.newest()
    assert record["state"] == "failed"
    assert [step["step"] for step in record["steps"]][-1] == "discard"


@pytest.mark.parametrize(
    "armed",
    [
        "host.swap.exchanged=KILL:front",
        # The front learns of the exchange when the engine that made it is dead already.
        "host.swap.intent=STOP:front,host.swap.exchanged=KILL:engine,host.swap.exchanged=CONT:front",
        "host.swap.exchanged=KILL:engine,host.swap.exchanged=KILL:front",
    ],
)
def test_kill_9_around_the_exchange_ends_on_the_old_pair(faulty: Faulty, armed: str) -> None:
    host = faulty.host
    with host.traffic(1) as clients:
        until(lambda: len(clients.finished) > 2)
        with faulty.fault(armed):
            assert faulty.fails(ExitCode.ROLLED_BACK).error is not None
        wait_for_ends(clients)
        record = host.newest()
        assert record["state"] == "rolled-back"
        assert "swap" in [step["step"] for step in record["steps"]]
        done = len(clients.finished)
        until(lambda: len([one for one in clients.finished[done:] if not one.failure]) > 3)
        (committed,) = [g["number"] for g in host.ask()["generations"] if g["state"] == "committed"]
        assert {one.generations for one in clients.finished[done:] if not one.failure} == {(committed, committed)}


@pytest.mark.parametrize("role", ["engine", "front"])
def test_kill_9_while_a_swap_is_pending(faulty: Faulty, role: str) -> None:
    host = faulty.host
    with faulty.fault("host.swap.intent=STOP:engine"), ThreadPoolExecutor(1) as pool:
        deploy = pool.submit(faulty.fails, ExitCode.ROLLED_BACK)
        until(lambda: host.step() == "swap" or deploy.done())
        pids = host.pids
        until(lambda: stopped(pids["engine"]) or deploy.done())
        os.kill(pids[role], signal.SIGKILL)
        if role == "front":
            # The engine exchanges although nobody follows: the host takes it back.
            os.kill(pids["engine"], signal.SIGCONT)
        deploy.result()
    assert host.newest()["state"] == "rolled-back"
    (other,) = {"front", "engine"} - {role}
    assert host.pids[other] == pids[other]


@pytest.mark.parametrize("role", ["engine", "front"])
def test_kill_9_on_probation_rolls_back(faulty: Faulty, role: str) -> None:
    host = faulty.host
    with host.traffic(1) as clients, ThreadPoolExecutor(1) as pool:
        until(lambda: len(clients.finished) > 2)
        deploy = pool.submit(faulty.fails, ExitCode.ROLLED_BACK)
        until(lambda: host.step() == "bake" or deploy.done())
        pids = host.pids
        host.kill(role)
        error = deploy.result().error
        wait_for_ends(clients)
        (other,) = {"front", "engine"} - {role}
        assert host.pids[other] == pids[other]
    assert error is not None
    assert error["code"] in ("host.process_gone", "host.process_lost")
    assert host.newest()["state"] == "rolled-back"


def test_a_build_that_spoils_its_output_is_sent_back_by_the_engine_itself(faulty: Faulty) -> None:
    host = faulty.host
    pids = host.pids
    with host.traffic(1) as clients, ThreadPoolExecutor(1) as pool:
        until(lambda: len(clients.finished) > 2)
        deploy = pool.submit(faulty.fails, ExitCode.ROLLED_BACK, POISONED)
        until(lambda: host.step() == "bake" or deploy.done())
        asked_s = time.monotonic()
        assert answer(host, POISON).status_code == httpx.codes.OK, "the old build ends what the new one spoiled"
        error = deploy.result().error
        assert time.monotonic() - asked_s < _END_S_MAX
    assert error is not None
    assert (error["code"], "finite" in error["why"]) == ("bake.breach", True)
    assert host.newest()["state"] == "rolled-back"
    assert host.pids == pids
    assert [one.failure for one in clients.responses if one.failure] == []


def test_after_all_that_a_hotfix_commits(faulty: Faulty) -> None:
    """A drain that is cut short ends responses with an error, which is not held against the new build."""
    host = faulty.host
    with host.traffic(4) as clients:
        until(lambda: len(clients.finished) > 4)
        done = host.deploy(faulty.patch("1.0.1"), "--policy", "drain", "--hard-stop-after-s", "0")
        assert done.data["state"] == "committed"
        assert host.serves("1.0.1")
    swap = next(step["data"] for step in host.newest()["steps"] if (step["step"], step["phase"]) == ("swap", "ok"))
    assert (swap["policy"], swap["mode"]) == ("drain", "drain")
    assert all("engine_cancelled" in one.failure for one in clients.responses if one.failure)
