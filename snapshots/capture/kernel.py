"""The four kernel interfaces write tracking stands on, by ctypes: no C code to build, nothing to link.

Sources: ``Documentation/admin-guide/mm/{userfaultfd,pagemap}.rst``, ``include/uapi/linux/{userfaultfd,fs}.h``
and process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import struct

PAGE_BYTES = 4096
PAGE_SHIFT = 12

# userfaultfd(2) has no libc wrapper.
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_USERFAULTFD_IOC_NEW = 0xAA00
_UFFD_API = 0xAA
_UFFD_USER_MODE_ONLY = 1
_REGISTER_MODE_WP = 2
# WP_ASYNC: the kernel clears the mark itself, nobody waits on a fault. WP_UNPOPULATED: PAGEMAP_SCAN insists on it.
_FEATURE_WP_UNPOPULATED = 1 << 13
_FEATURE_WP_ASYNC = 1 << 15

_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARG = struct.Struct("=12Q")
WP_MATCHING = 1
CHECK_WPASYNC = 2
WRITTEN = 1 << 1
FILE = 1 << 2
PRESENT = 1 << 3
SWAPPED = 1 << 4
ZERO_PAGE = 1 << 5
_GUARD = 1 << 8

# UIO_MAXIOV: more pieces in one process_vm_readv are refused.
IOV_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def open_userfaultfd() -> int:
    """A userfaultfd of this process with asynchronous write protection; returns the descriptor.

    User-mode-only is enough (asynchronous marks never block a kernel-mode fault) and needs no capability. Where
    a seccomp filter hides the system call, ``/dev/userfaultfd`` is tried.

    Raises:
        OSError: ENOSYS, EPERM, or EINVAL where the kernel lacks WP_ASYNC (before 6.7).
    """
    number = _SYS_USERFAULTFD.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"userfaultfd: no system call number for {platform.machine()}")
    fd: int = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY)
    if fd < 0:
        refused = _last_error("userfaultfd")
        try:
            device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise refused from None
        try:
            fd = fcntl.ioctl(device, _USERFAULTFD_IOC_NEW, os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(device)
    try:
        fcntl.ioctl(fd, _UFFDIO_API, struct.pack("=QQQ", _UFFD_API, _FEATURE_WP_UNPOPULATED | _FEATURE_WP_ASYNC, 0))
    except OSError:
        os.close(fd)
        raise
    return fd


def register_write_tracking(uffd: int, start: int, end: int) -> None:
    """Put ``[start, end)`` of this process under asynchronous write tracking.

    Raises:
        OSError: EINVAL (not mapped, or of a kind that can't be tracked), EBUSY (another userfaultfd owns it).
    """
    fcntl.ioctl(uffd, _UFFDIO_REGISTER, struct.pack("=QQQQ", start, end - start, _REGISTER_MODE_WP, 0))


def pagemap_scan(
    pagemap: int,
    start: int,
    end: int,
    *,
    require: int,
    exclude: int = 0,
    any_of: int = 0,
    flags: int = 0,
    vec_address: int = 0,
    vec_len: int = 0,
) -> int:
    """One PAGEMAP_SCAN over ``[start, end)``; returns how many page runs were stored at ``vec_address``.

    Args:
        pagemap: descriptor of ``/proc/<pid>/pagemap``.
        start: first address, page aligned.
        end: address after the last page.
        require: categories a page must have.
        exclude: categories a page must not have.
        any_of: categories of which a page must have one.
        flags: WP_MATCHING re-arms the pages found, in the same step; CHECK_WPASYNC refuses untracked memory.
        vec_address: array of ``struct page_region`` (three u64: start, end, categories).
        vec_len: its length; on a result equal to it, resume from the last run's end (``walk_end`` goes stale
            on kernels up to 6.18 once more than 512 runs are asked for).

    Raises:
        OSError: EPERM (CHECK_WPASYNC on untracked memory), ENOTTY (no PAGEMAP_SCAN: before 6.7), ESRCH.
    """
    argument = ctypes.create_string_buffer(
        _SCAN_ARG.pack(
            _SCAN_ARG.size,
            flags,
            start,
            end,
            0,
            vec_address,
            vec_len,
            0,
            exclude,
            require | exclude,
            any_of,
            require if vec_len else 0,
        ),
        _SCAN_ARG.size,
    )
    found: int = _libc.ioctl(pagemap, _PAGEMAP_SCAN, argument)
    if found < 0:
        raise _last_error("PAGEMAP_SCAN")
    return found


@functools.cache
def never_content() -> int:
    """Categories of pages that hold nothing written: the zero page, and guard pages where the kernel names them.

    Guard pages (MADV_GUARD_INSTALL, used by newer thread stacks) read as swapped and written, yet can't be read.
    """
    page = ctypes.create_string_buffer(24)
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pagemap_scan(
            pagemap, 0, PAGE_BYTES, require=WRITTEN, exclude=_GUARD, vec_address=ctypes.addressof(page), vec_len=1
        )
    except OSError as error:
        if error.errno == errno.EINVAL:  # before 6.15
            return ZERO_PAGE
        raise
    finally:
        os.close(pagemap)
    return ZERO_PAGE | _GUARD


def process_vm_readv(pid: int, local: int, size_bytes: int, remote_iov: int, pieces: int) -> int:
    """Copy ``pieces`` remote ranges into ``size_bytes`` contiguous bytes at ``local``; returns the bytes copied.

    A short count means that the range at that offset can't be read; what comes before it is good.

    Raises:
        OSError: ESRCH (no such process), EPERM (not allowed), EFAULT (the very first byte can't be read).
    """
    iov = (ctypes.c_size_t * 2)(local, size_bytes)
    copied: int = _libc.process_vm_readv(pid, iov, 1, remote_iov, pieces, 0)
    if copied < 0:
        raise _last_error("process_vm_readv")
    return copied
