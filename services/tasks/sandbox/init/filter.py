"""The system calls that no program of a run may make: a seccomp filter, in the kernel's own small language.

Everything in ``ABSENT`` and ``FORBIDDEN`` is either a way around a limit (memory that no process maps, structures of the
kernel without one), a way to others (sockets of families that no namespace holds, another process's memory and limits), or
a part of the kernel that ordinary programs never call and that most of its faults have been in.

Source: seccomp(2); include/uapi/linux/{filter,seccomp,audit}.h; the numbers are those of x86_64 and of asm-generic.
"""

import ctypes
import errno
import os
import struct
from typing import Final

from .namespaces import LIBC, check

ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Their numbers in the kernel's audit. Calls of another one, such as 32-bit programs make, end the process."""
NEWEST: Final = 462
"""mseal, of Linux 6.10. What was added later is absent: nobody has looked at it for this list."""
ABSENT: Final = {
    "clone3": (435, 435),  # its flags lie in memory, where no filter reads them; libc then uses clone
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "landlock_create_ruleset": (444, 444),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
}  # fmt: skip
"""Answered with ENOSYS, as by a kernel that was built without them."""
FORBIDDEN: Final = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "vmsplice": (278, 75),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41), "mount": (165, 40),
    "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
"""Answered with EPERM."""
CALLS_BY_ARGUMENT: Final = {
    "clone": (56, 220), "mmap": (9, 222), "prlimit64": (302, 261), "ioctl": (16, 29), "socket": (41, 198),
    "socketpair": (53, 199), "setsockopt": (54, 208),
}  # fmt: skip
NEW_NAMESPACES: Final = 0x7E020000
"""Every CLONE_NEW... that clone(2) takes."""
SHARED_AND_ANONYMOUS: Final = 0x21
"""MAP_SHARED | MAP_ANONYMOUS: its pages stay when no process has them in its tables, and nothing counts them."""
AF_UNIX: Final = 1
"""The only family: AF_VSOCK reaches a virtual machine's host from every network namespace, and buffers of TCP grow."""
BUFFER_SIZES: Final = (7, 8)
"""SO_SNDBUF and SO_RCVBUF: they stay as they are, and the caller hears that all is well."""
TIOCSTI: Final = 0x5412
LOAD, AND, IF_EQUAL, IF_GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the jumps are relative to the next one."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def answered(error: int) -> bytes:
    """The call fails with ``error``."""
    return step(RETURN, ERROR | error)


def on_argument(index: int, mask: int | None, values: tuple[int, ...], error: int, *, equal: bool) -> list[bytes]:
    """Fail when the argument is one of ``values`` (or with ``equal`` false: none of them), and allow otherwise."""
    steps = [step(LOAD, FIRST_ARGUMENT + 8 * index)]  # the lower half: both architectures are little-endian
    if mask is not None:
        steps.append(step(AND, mask))
    found, other = (answered(error), step(RETURN, ALLOW)) if equal else (step(RETURN, ALLOW), answered(error))
    for value in values:
        steps += [step(IF_EQUAL, value, 0, 1), found]
    return [*steps, other]


def filter_of(machine: str) -> bytes:
    """The filter for ``machine``, as uname names it. Raises: OSError for one that nobody has written down."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter is written for {machine}, only for {' and '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    steps = [
        step(LOAD, ARCHITECTURE), step(IF_EQUAL, ARCHITECTURES[machine], 1, 0), step(RETURN, KILL),
        step(LOAD, NUMBER), step(IF_GREATER, NEWEST, 0, 1), answered(errno.ENOSYS),
    ]  # fmt: skip
    for calls, error in ((ABSENT, errno.ENOSYS), (FORBIDDEN, errno.EPERM)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                steps += [step(IF_EQUAL, number, 0, 1), answered(error)]
    # Of masks: all that is not 0 but for the one value that means "all of these bits".
    new = on_argument(0, NEW_NAMESPACES, (0,), errno.EPERM, equal=False)
    for name, body in (
        ("clone", new),
        ("mmap", on_argument(3, SHARED_AND_ANONYMOUS, (SHARED_AND_ANONYMOUS,), errno.EPERM, equal=True)),
        # The first process of the run has the same user, and its limits could be lowered until it dies.
        ("prlimit64", on_argument(0, None, (0,), errno.EPERM, equal=False)),
        ("ioctl", on_argument(1, None, (TIOCSTI,), errno.EPERM, equal=True)),
        ("socket", on_argument(0, None, (AF_UNIX,), errno.EAFNOSUPPORT, equal=False)),
        ("socketpair", on_argument(0, None, (AF_UNIX,), errno.EAFNOSUPPORT, equal=False)),
        ("setsockopt", on_argument(2, None, BUFFER_SIZES, 0, equal=True)),
    ):
        steps += [step(IF_EQUAL, CALLS_BY_ARGUMENT[name][column], 0, len(body)), *body]
    return b"".join([*steps, step(RETURN, ALLOW)])


class FilterProgram(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def require_filters() -> bytes:
    """This machine's filter. Raises: OSError where the kernel takes none."""
    steps = filter_of(os.uname().machine)
    # The kernel gets as far as reading what is not there, or knows no filters.
    LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)
    if (error := ctypes.get_errno()) != errno.EFAULT:
        raise OSError(error, "this kernel takes no seccomp filters: it needs CONFIG_SECCOMP_FILTER, and leave to use them")
    return steps


def forbid(steps: bytes) -> None:
    """From here on, for this process and all that it starts. It needs PR_SET_NO_NEW_PRIVS."""
    program = FilterProgram(len(steps) // 8, steps)
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")
