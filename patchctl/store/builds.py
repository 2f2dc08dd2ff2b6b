"""Builds on disk, one folder each, named by digest.

``<root>/builds/sha256-<hex>/`` is complete from the moment it exists: it is filled aside and renamed.
Files are 0444 because builds share unchanged files through hard links: a write through one build
would alter the others. Root can still do it, so whoever loads a build verifies it first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from engine.build import MANIFEST_NAME, BuildInvalidError, BuildManifest, read_manifest, verify_build
from patchctl.atomic import fsync_dir
from patchctl.errors import ExitCode, PatchctlError
from patchctl.store.failure import build_damaged, explained, not_found, require_space
from patchctl.store.files import copy_file, link_or_copy, seal_file, sync_folders, write_file

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_FOLDER = re.compile(r"sha256-[0-9a-f]{64}\Z")
_ASIDE_PREFIX = ".aside-"


class BuildStore:
    """The builds of one host.

    Every unfinished folder is locked by its writer (``flock`` on the folder, released by the kernel when the
    writer dies). Opening a store removes the unlocked ones. Creating and locking happens
    under the store's own lock, so a folder is never seen between the two.

    Attributes:
        root: the store's folder, created when missing.
        builds: where the builds are.
    """

    def __init__(self, root: Path) -> None:
        """Open the store and remove what crashed writers left.

        Raises:
            PatchctlError: ``store.io_failed``: the folder cannot be used.
        """
        self.root = root
        self.builds = root / "builds"
        with explained():
            self.builds.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def path(self, digest: str) -> Path:
        """The folder of a build, present or not.

        Raises:
            PatchctlError: ``store.not_found``: ``digest`` is not of the form ``sha256:<64 hex>``.
        """
        if not _DIGEST.match(digest):
            raise not_found(digest)
        return self.builds / digest.replace(":", "-")

    def has(self, digest: str) -> bool:
        """True when the build is there. :meth:`verify` tells whether it is sound."""
        return self.path(digest).is_dir()

    def list(self) -> tuple[str, ...]:
        """The digests of all builds, sorted."""
        names = (path.name for path in self.builds.iterdir() if _FOLDER.match(path.name))
        return tuple(sorted(name.replace("-", ":") for name in names))

    def verify(self, digest: str) -> BuildManifest:
        """Re-hash a build.

        Raises:
            PatchctlError: ``store.not_found`` or ``store.build_damaged``.
        """
        if not self.has(digest):
            raise not_found(digest)
        with explained():
            try:
                return verify_build(self.path(digest), digest)
            except BuildInvalidError as error:
                raise build_damaged(f"{digest}: {error}") from error

    def import_build(self, folder: Path, *, link: bool = False) -> str:
        """Add a build from outside; returns its digest. A build that is already there is verified instead.

        Args:
            folder: the build.
            link: share the files through hard links instead of copying them, where the filesystem
                allows it. They become read-only in ``folder`` too.

        Raises:
            PatchctlError: ``store.build_damaged``, ``store.disk_short``, ``store.io_failed``.
        """
        try:
            manifest = read_manifest(folder)
        except BuildInvalidError as error:
            raise build_damaged(str(error)) from error
        if self.has(manifest.digest):
            self.verify(manifest.digest)
            return manifest.digest
        with explained(), self.aside() as aside:
            content_bytes = 0 if link else sum(entry.size_bytes for entry in manifest.files)
            require_space(self.builds, content_bytes, len(manifest.files))
            _refuse_unlisted(folder, manifest)
            for entry in manifest.files:
                (link_or_copy if link else copy_file)(folder / entry.path, aside / entry.path)
                seal_file(aside / entry.path)
            write_file(aside / MANIFEST_NAME, manifest.encode())
            try:
                verify_build(aside, manifest.digest)
            except BuildInvalidError as error:
                raise build_damaged(str(error)) from error
            self.install(aside, manifest.digest)
        return manifest.digest

    def remove(self, digest: str, *, protected: Collection[str] = ()) -> None:
        """Delete a build, in one step for every observer.

        Raises:
            PatchctlError: ``store.protected``: it is one of ``protected`` (active, standby, rollback
                target); ``store.not_found``; ``store.io_failed``.
        """
        if digest in protected:
            raise PatchctlError(
                code="store.protected",
                what=f"Build {digest} was not removed.",
                why="it serves, or it is what a rollback returns to",
                exit_code=ExitCode.HELD,
            )
        if not self.has(digest):
            raise not_found(digest)
        with explained(), self.aside() as aside:
            self.path(digest).rename(aside / "removed")
            fsync_dir(self.builds)

    @contextlib.contextmanager
    def aside(self) -> Iterator[Path]:
        """An empty folder to fill and then :meth:`install`; what is left of it at the end is deleted."""
        with self._locked():
            folder = Path(tempfile.mkdtemp(prefix=_ASIDE_PREFIX, dir=self.builds))
            fd = _lock_folder(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)

    def install(self, aside: Path, digest: str) -> Path:
        """Rename a complete, verified folder from :meth:`aside` to its final name, durably.

        Raises:
            PatchctlError: another writer was first and left ``store.build_damaged``.
            OSError: the disk failed; nothing was installed.
        """
        sync_folders(aside)
        final = self.path(digest)
        try:
            aside.rename(final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            self.verify(digest)
        fsync_dir(self.builds)
        return final

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        with self._locked():
            for folder in self.builds.glob(f"{_ASIDE_PREFIX}*"):
                # The owner deletes its folder without the store's lock: it may be gone by now.
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    fd = _lock_folder(folder)
                    try:
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os.close(fd)


def _lock_folder(folder: Path) -> int:
    """A descriptor holding the exclusive lock of ``folder``.

    Raises:
        BlockingIOError: somebody holds it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_unlisted(folder: Path, manifest: BuildManifest) -> None:
    """Only plain files the manifest lists, and folders. A link could lead the copying elsewhere."""
    listed = {entry.path for entry in manifest.files} | {MANIFEST_NAME}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or (path.is_file() and name in listed)):
            raise build_damaged(f"{name} is a link or device, or not listed in {MANIFEST_NAME}")
