"""The journal's tables. A schema change gets a new ``SCHEMA_VERSION`` and a migration."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1

METADATA = MetaData()

META = Table("meta", METADATA, Column("key", String, primary_key=True), Column("value", String, nullable=False))

TRANSACTIONS = Table(
    "transactions",
    METADATA,
    Column("id", String, primary_key=True),
    Column("op_id", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("actor", String, nullable=False),
    Column("state", String, nullable=False),
    Column("started_unix_ns", BigInteger, nullable=False),
    Column("ended_unix_ns", BigInteger),
    Column("patch_id", String, nullable=False),
    Column("base_digest", String, nullable=False),
    Column("target_digest", String, nullable=False),
    Column("error", Text),
)

STEPS = Table(
    "steps",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("transaction_id", String, ForeignKey("transactions.id"), nullable=False, index=True),
    Column("step", String, nullable=False),
    Column("phase", String, nullable=False),
    Column("at_unix_ns", BigInteger, nullable=False),
    Column("data", Text, nullable=False),
)

# One row per load of a build: the number is the generation's name for as long as the journal lives.
GENERATIONS = Table(
    "generations",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("digest", String, nullable=False),
    Column("version", String, nullable=False),
    Column("transaction_id", String),
    Column("state", String, nullable=False),
    Column("committed_unix_ns", BigInteger),
    sqlite_autoincrement=True,
)
