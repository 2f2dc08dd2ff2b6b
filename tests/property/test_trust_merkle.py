"""The log's tree against RFC 9162's recursive definition and its verification algorithm (section 2.1.3.2)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchctl.trust.merkle import MerkleTree, leaf_hash


def _naive_root(entries: list[bytes]) -> bytes:
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    split = 1
    while split * 2 < len(entries):
        split *= 2
    return hashlib.sha256(b"\x01" + _naive_root(entries[:split]) + _naive_root(entries[split:])).digest()


def _proven_root(entry: bytes, index: int, size: int, proof: list[bytes]) -> bytes | None:
    node, last, result = index, size - 1, leaf_hash(entry)
    for sibling in proof:
        if last == 0:
            return None
        if node % 2 or node == last:
            result = hashlib.sha256(b"\x01" + sibling + result).digest()
            while node % 2 == 0 and node:
                node, last = node >> 1, last >> 1
        else:
            result = hashlib.sha256(b"\x01" + result + sibling).digest()
        node, last = node >> 1, last >> 1
    return result if last == 0 else None


@given(st.lists(st.binary(max_size=8), max_size=70))
def test_every_prefix_has_the_naive_root(entries: list[bytes]) -> None:
    tree = MerkleTree()
    assert [tree.append(entry) for entry in entries] == list(range(len(entries)))
    for size in range(len(entries) + 1):
        assert tree.root(size) == _naive_root(entries[:size])
    assert tree.root() == _naive_root(entries)


@given(st.integers(1, 70), st.data())
def test_every_proof_leads_to_the_root(size: int, data: st.DataObject) -> None:
    entries = [index.to_bytes(2, "big") for index in range(size)]
    tree = MerkleTree()
    for entry in entries:
        tree.append(entry)
    at = data.draw(st.integers(1, size))
    index = data.draw(st.integers(0, at - 1))
    proof = tree.inclusion_proof(index, at)
    assert _proven_root(entries[index], index, at, proof) == tree.root(at)
    assert _proven_root(b"other", index, at, proof) != tree.root(at)


def test_what_is_not_in_the_tree_has_no_root_and_no_proof() -> None:
    tree = MerkleTree()
    tree.append(b"x")
    for call in (lambda: tree.root(2), lambda: tree.inclusion_proof(1), lambda: tree.inclusion_proof(0, 2)):
        with pytest.raises(ValueError, match="the tree has 1"):
            call()
