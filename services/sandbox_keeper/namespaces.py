"""Namespaces of one run, and the rights that it gives up in them."""

import ctypes
import os
import struct
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
CAPABILITY_VERSION = 0x20080522
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise an OSError if a call of libc failed."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, what + ": " + os.strerror(error))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    check(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), "mount " + target)


def enter_namespaces(limits: dict[str, Any], may_write_box: bool) -> None:
    """Namespaces of users, mounts, processes (for children) and IPC; what a run may see of the file system."""
    uid, gid = os.getuid(), os.getgid()
    check(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    scratch = f"mode=1777,size={limits['scratch_bytes']}"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, scratch)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, scratch)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_RDONLY, "size=0")
    if not may_write_box:
        mount("/box", "/box", "", MS_BIND)
        mount("none", "/box", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def drop_rights() -> None:
    """No capability, now or by any program that is started later."""
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # an error for those that the kernel does not know
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("II", CAPABILITY_VERSION, 0)
    check(LIBC.capset(header, bytes(24)), "capset")
