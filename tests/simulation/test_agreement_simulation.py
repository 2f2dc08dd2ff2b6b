"""Ranks that agree, or do not, over a network that loses, repeats, delays and reorders: seeds replay.

What must hold is seen from outside: whichever ranks run an iteration run it on the same generation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.agreement import COORDINATOR, AgreementLimits, Coordinator, Message, Outbox, Rank, Step
from engine.errors import SwapRefusedError

LIMITS = AgreementLimits()
TICK_S = 0.02
TICKS = 1500
SETTLE_TICKS = 600


@dataclass
class Node:
    """One rank's process: its halves of the protocol, and what it computes."""

    rank: Rank
    group: int
    iteration: int = 0
    generation: int = 0
    target: int = 0


@dataclass(order=True)
class Packet:
    arrives: int
    serial: int
    to: int = field(compare=False)
    message: Message = field(compare=False)


class Network:
    """A group of ranks, the messages between them, and an observer that nobody can lie to."""

    def __init__(self, seed: int, *, lossy: bool) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a simulation, replayed from its seed
        self.size = self.random.randint(2, 4)
        self.lossy = lossy
        self.lockstep = self.random.random() < 0.7
        self.loss = self.random.choice((0.0, 0.05, 0.3)) if lossy else 0.0
        self.delay_max = self.random.choice((1, 4, 40)) if lossy else 1
        self.now = self.serial = 0
        self.packets: list[Packet] = []
        self.nodes: dict[int, Node] = {}
        # (group, iteration) → generation that somebody ran it on.
        self.ran: dict[tuple[int, int], int] = {}
        self.exchanges = self.holds = self.refusals = 0
        self.group = 1
        self.restarting: list[int] = []
        for rank in range(self.size):
            self.boot(rank)

    def boot(self, rank: int) -> None:
        """A fresh process joins the newest group."""
        node = Node(Rank(rank, self.size, self.group, lambda generation: self.earliest(rank, generation)), self.group)
        self.nodes[rank] = node
        if rank == COORDINATOR:
            self.coordinator = Coordinator(self.size, self.group)

    def earliest(self, rank: int, generation: int) -> int | str:
        if self.lossy and self.random.random() < 0.05:
            return "still staging"
        node = self.nodes[rank]
        node.target = generation
        return node.iteration + self.random.randint(0, 5)

    @property
    def now_s(self) -> float:
        return self.now * TICK_S

    def send(self, outbox: Outbox) -> None:
        for to, message in outbox:
            copies = 1 if self.random.random() >= self.loss else self.random.choice((0, 0, 2))
            for _ in range(copies):
                self.serial += 1
                self.packets.append(Packet(self.now + self.random.randint(1, self.delay_max), self.serial, to, message))

    def deliver(self) -> None:
        due = [packet for packet in self.packets if packet.arrives <= self.now]
        self.packets = [packet for packet in self.packets if packet.arrives > self.now]
        self.random.shuffle(due)
        for packet in due:
            node = self.nodes.get(packet.to)
            if node is None:
                continue
            self.send(node.rank.receive(packet.message))
            if packet.to == COORDINATOR:
                self.send(self.coordinator.receive(packet.message, self.now_s))

    def start(self) -> None:
        if COORDINATOR not in self.nodes:
            return
        generation = self.random.randint(1, 9)
        try:
            _, outbox = self.coordinator.start(generation, self.now_s)
        except SwapRefusedError:
            self.refusals += 1
            return
        self.send(outbox)

    def step(self, rank: int) -> None:
        """One boundary and, unless it holds, the iteration after it."""
        node = self.nodes[rank]
        peers = [other for other in self.nodes.values() if other.group == node.group]
        if self.lockstep and any(other.iteration < node.iteration for other in peers):
            return
        if rank == COORDINATOR:
            self.send(self.coordinator.boundary(node.iteration))
        action, outbox = node.rank.boundary(node.iteration, self.now_s)
        self.send(outbox)
        if action is Step.HOLD:
            self.holds += 1
            return
        if action is Step.EXCHANGE:
            self.exchanges += 1
            node.generation = node.target
        ran = self.ran.setdefault((node.group, node.iteration), node.generation)
        assert ran == node.generation, f"rank {rank} alone runs iteration {node.iteration} on {node.generation}"
        node.iteration += 1

    def crash(self) -> None:
        """One process ends; some time later the whole group is restarted, one by one."""
        if not self.nodes:
            return
        victim = self.random.choice(list(self.nodes))
        del self.nodes[victim]
        if victim != COORDINATOR and COORDINATOR in self.nodes and self.random.random() < 0.7:
            self.send(self.coordinator.died(victim))

    def restart(self) -> None:
        """The next process of a broken group is replaced; the new group is whole when all are."""
        if not self.restarting:
            if len(self.nodes) == self.size:
                return
            self.group += 1
            self.restarting = self.random.sample(range(self.size), self.size)
        self.boot(self.restarting.pop())

    def heal(self) -> None:
        """No message is lost or late any more, and a broken group is restarted as a whole."""
        self.loss, self.delay_max = 0.0, 1
        while self.restarting or len(self.nodes) < self.size:
            self.restart()

    def tick(self) -> None:
        self.now += 1
        self.deliver()
        if COORDINATOR in self.nodes:
            self.send(self.coordinator.tick(self.now_s))
        for rank in self.random.sample(sorted(self.nodes), len(self.nodes)):
            if self.random.random() < 0.6:
                self.step(rank)


def simulate(seed: int, *, lossy: bool = True, crashes: bool = True) -> Network:
    network = Network(seed, lossy=lossy)
    try:
        for _ in range(TICKS):
            if network.random.random() < 0.03:
                network.start()
            if crashes and not network.restarting and network.random.random() < 0.004:
                network.crash()
            if network.random.random() < 0.05:
                network.restart()
            network.tick()
        settle(network)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return network


def settle(network: Network) -> None:
    """The network heals: nobody is left undecided, and everybody moves on."""
    network.heal()
    for _ in range(SETTLE_TICKS):
        network.tick()
    assert network.coordinator.undecided is None
    before = {rank: node.iteration for rank, node in network.nodes.items()}
    for _ in range(100):
        network.tick()
    assert all(node.iteration > before[rank] for rank, node in network.nodes.items()), "a rank is stuck"
    assert len({node.generation for node in network.nodes.values()}) == 1


@pytest.mark.parametrize("seed", range(200))
def test_no_rank_ever_exchanges_alone(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_every_attempt_succeeds(seed: int) -> None:
    network = Network(seed, lossy=False)
    for generation in range(1, 6):
        network.send(network.coordinator.start(generation, network.now_s)[1])
        for _ in range(100):
            network.tick()
        assert {node.generation for node in network.nodes.values()} == {generation}
    assert network.exchanges == 5 * network.size


def test_the_simulation_reaches_what_it_is_for() -> None:
    networks = [simulate(seed) for seed in range(500, 540)]
    assert sum(network.exchanges for network in networks) > 100
    assert sum(network.holds for network in networks) > 100
    assert sum(network.refusals for network in networks) > 100
    assert sum(network.group > 2 for network in networks) > 10
