"""Namespaces of one run, and the rights that it gives up in them."""

import ctypes
import os
import signal
import struct
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
CAPABILITY_VERSION = 0x20080522
SYS_CLONE3 = 435  # on every architecture
INODE_BYTES = 4096
"""Of a file system's bytes, for each of its files: the kernel's own memory of a file counts nowhere."""
LIBC = ctypes.CDLL(None, use_errno=True)
WITH_LOCK = ctypes.PyDLL(None, use_errno=True)
"""Python's lock is held meanwhile, so that a child which this makes has it."""


class CloneArguments(ctypes.Structure):
    """What clone3(2) takes, in its first version."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    )


def check(result: int, what: str) -> None:
    """Raise an OSError if a call of libc failed."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, what + ": " + os.strerror(error))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    check(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), "mount " + target)


def clone() -> int:
    """A child in namespaces of users, mounts, processes and IPC of its own, as fork(2) makes one.

    Gives the child's number, and 0 in the child, where libc's own notes of its thread are the parent's: it may call the
    kernel and fork, and little else. One call is cheaper than fork, unshare and another fork for the processes' namespace.
    """
    arguments = CloneArguments(flags=CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC, exit_signal=signal.SIGCHLD)
    pid: int = WITH_LOCK.syscall(SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    if pid < 0:
        check(pid, "clone3")
    return pid


def fork() -> int:
    """fork(2) without what Python calls after it for the sake of threads, of which there are none: a third of its cost."""
    pid: int = WITH_LOCK.fork()
    if pid < 0:
        check(pid, "fork")
    return pid


def enter(uid: int, gid: int, limits: dict[str, Any], may_write_sandbox: bool) -> None:
    """What a run may see of the file system, in the namespaces that ``clone`` has made."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        write("/proc/self/" + name, text)
    # Where the whole machine has too little memory, this ends first.
    write("/proc/self/oom_score_adj", "1000")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    scratch = f"mode=1777,size={limits['scratch_bytes']},nr_inodes={max(1024, limits['scratch_bytes'] // INODE_BYTES)}"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, scratch)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, scratch)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=0")
    if not may_write_sandbox:
        mount("/sandbox", "/sandbox", "", MS_BIND)
        mount("none", "/sandbox", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def write(path: str, text: str) -> None:
    """A small file of the kernel's."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def drop_rights() -> None:
    """No capability, now or by any program that is started later."""
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1  # up to the first that the kernel does not know
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("II", CAPABILITY_VERSION, 0)
    check(LIBC.capset(header, bytes(24)), "capset")
