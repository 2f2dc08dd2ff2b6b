"""The block pool under random use: nothing is lost or given out twice, and a prefix is found only where it is."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.table import KvSpace, KvTable

BLOCKS, SIZE = range(3, 15), 4
GENERATIONS = (1, 2)
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Pooling(RuleBasedStateMachine):
    """Tables of a few sequences; ``content`` shadows blocks as (generation, all tokens up to the block's end)."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables: list[tuple[int, list[int], KvTable]] = []
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}

    @rule(generation=st.sampled_from(GENERATIONS), tokens=tokens_of)
    def open(self, generation: int, tokens: list[int]) -> None:
        table = KvTable(KvSpace(generation, self.pool), tokens)
        assert table.cached < len(tokens)
        assert table.cached == SIZE * len(table.blocks)
        for number, block in enumerate(table.blocks):
            # A prefix hit means: made by this generation, for exactly these tokens.
            assert self.content[block] == (generation, tuple(tokens[: (number + 1) * SIZE]))
        self.tables.append((generation, tokens, table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 8))
    def compute(self, data: st.DataObject, count: int) -> None:
        generation, tokens, table = data.draw(st.sampled_from(self.tables))
        end = min(len(tokens), table.cached + count)
        before, available = list(table.blocks), self.pool.available
        grown = table.grow(end)
        if grown is None:
            assert table.blocks == before
            assert self.pool.available == available
            assert -(-end // SIZE) - len(before) > available
            return
        assert table.blocks == before + list(grown)
        held = {block for _, _, other in self.tables if other is not table for block in other.blocks}
        assert not held & set(grown)
        for block in grown:
            self.content.pop(block, None)
        table.advance(tokens, end)
        for number in range(end // SIZE):
            self.content[table.blocks[number]] = (generation, tuple(tokens[: (number + 1) * SIZE]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.tables))
        self.tables.remove(entry)
        entry[2].close()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        _, tokens, table = entry = data.draw(st.sampled_from(self.tables))
        blocks = set(table.blocks)
        table.distrust()
        self.tables.remove(entry)
        table.close()
        for generation in GENERATIONS:
            found = self.pool.match(generation, tokens)
            assert not blocks & set(found)
            for block in found:
                self.pool.release(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def carry(self, data: st.DataObject) -> None:
        _, tokens, table = data.draw(st.sampled_from(self.tables))
        known = {block: self.pool.link(block) for block in table.blocks}
        table.carry()
        if table.grow(len(tokens)) is not None:
            for block in table.blocks:
                self.content.setdefault(block, (0, ()))
            table.advance(tokens, len(tokens))
        assert all(self.pool.link(block) == known.get(block) for block in table.blocks)
        # Its further blocks are nobody's prefix, so the shadow need not tell them apart.
        self.tables = [entry for entry in self.tables if entry[2] is not table]
        table.close()

    @rule(generation=st.sampled_from(GENERATIONS))
    def forget(self, generation: int) -> None:
        self.pool.forget(generation)
        for _, tokens, _ in self.tables:
            assert self.pool.match(generation, tokens) == []
        for number, (made_by, tokens, table) in enumerate(self.tables):
            if made_by == generation:
                table.carry()
                self.tables[number] = (made_by, tokens, table)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        idle = self.pool.idle
        assert self.pool.evict(count) == min(count, idle)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        held = {block for _, _, table in self.tables for block in table.blocks}
        assert self.pool.held == len(held)
        assert self.pool.held + self.pool.available == len(BLOCKS)
        free = self.pool.free
        assert len(set(free)) == len(free)
        assert not held & set(free)
        assert set(free) | held <= set(BLOCKS)
        assert self.pool.idle == len(BLOCKS) - len(held) - len(free)

    def teardown(self) -> None:
        for _, _, table in self.tables:
            table.close()
        assert self.pool.available == len(BLOCKS)


TestPooling = Pooling.TestCase
TestPooling.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
