"""Where patchctl keeps things: one home folder, every path in it named here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from patchctl.errors import ExitCode, PatchctlError

# sun_path of sockaddr_un is 108 bytes with its NUL (unix(7)).
_SOCKET_PATH_BYTES_MAX = 107


@dataclass(frozen=True, slots=True)
class Home:
    """The folders of one operator or one engine host."""

    root: Path

    @staticmethod
    def resolve(flag: Path | None) -> Home:
        """The home: flag, else ``PATCHCTL_HOME``, else the XDG state folder."""
        if flag is not None:
            return Home(flag.absolute())
        if env := os.environ.get("PATCHCTL_HOME"):
            return Home(Path(env).absolute())
        from platformdirs import user_state_path

        return Home(user_state_path("patchctl"))

    @property
    def trust(self) -> Path:
        """Trust domains, one folder each."""
        return self.root / "trust"

    @property
    def host(self) -> Path:
        """State of the engine host: store, journal, evidence."""
        return self.root / "host"

    @property
    def store(self) -> Path:
        """The host's content-addressed builds."""
        return self.host / "store"

    @property
    def journal(self) -> Path:
        """The host's transaction journal (SQLite)."""
        return self.host / "journal.db"

    @property
    def evidence(self) -> Path:
        """Snapshots, diffs and verdicts, one folder per transaction."""
        return self.host / "evidence"

    @property
    def host_snapshots(self) -> Path:
        """The engine host's stored snapshots."""
        return self.host / "snapshots"

    @property
    def snapshots(self) -> Path:
        """Snapshots of any other process."""
        return self.root / "snapshots"

    @property
    def inbox(self) -> Path:
        """Uploads that no transaction has taken yet."""
        return self.host / "inbox"

    @property
    def freshness(self) -> Path:
        """Highest accepted sequence per channel and target."""
        return self.host / "freshness.json"

    @property
    def decisions(self) -> Path:
        """The gate's hash-chained decision log."""
        return self.host / "decisions.jsonl"

    @property
    def socket(self) -> Path:
        """The agent's unix socket.

        Raises:
            PatchctlError: ``host.socket_path_long`` when the kernel could not bind it.
        """
        path = self.host / "agent.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            raise PatchctlError(
                code="host.socket_path_long",
                what="the agent's unix socket cannot be created",
                why=f"{path} is longer than {_SOCKET_PATH_BYTES_MAX} bytes, the kernel's limit",
                exit_code=ExitCode.USAGE,
                next_command="PATCHCTL_HOME=/a/shorter/folder patchctl engine serve …",
            )
        return path

    @property
    def models(self) -> Path:
        """Converted models; a cache that outlives a temporary home."""
        if env := os.environ.get("PATCHCTL_CACHE"):
            return Path(env).absolute()
        from platformdirs import user_cache_path

        return user_cache_path("patchctl") / "models"
