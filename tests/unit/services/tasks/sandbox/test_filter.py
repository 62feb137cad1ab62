"""The filter's numbers and steps, for both architectures, on a machine of either."""

import ctypes
import ctypes.util
import errno
import struct

import pytest

from gspo_services.tasks.sandbox.init.filter import (
    ABSENT,
    ALLOW,
    ARCHITECTURES,
    CALLS_BY_ARGUMENT,
    ERROR,
    FORBIDDEN,
    KILL,
    filter_of,
)

LOAD, AND, IF_EQUAL, IF_GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
TOO_NEW = ("memfd_secret", "quotactl_fd", "process_madvise")
"""What an older libseccomp may not know."""


def answer(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would make of a call: the filter's steps, taken one by one."""
    steps = list(struct.iter_unpack("=HBBI", filter_of(machine)))
    six = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *six)
    place, kept = 0, 0
    while True:
        code, if_true, if_false, value = steps[place]
        place += 1
        if code == LOAD:
            (kept,) = struct.unpack_from("=I", data, value)
        elif code == AND:
            kept &= value
        elif code == RETURN:
            return int(value)
        else:
            holds = kept == value if code == IF_EQUAL else kept > value
            assert code in (IF_EQUAL, IF_GREATER)
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_libseccomp(machine: str) -> None:
    found = ctypes.util.find_library("seccomp")
    if found is None:
        pytest.skip("libseccomp is not here")
    resolve = ctypes.CDLL(found).seccomp_syscall_resolve_name_arch
    for name, numbers in {**ABSENT, **FORBIDDEN, **CALLS_BY_ARGUMENT}.items():
        said = resolve(ctypes.c_uint32(ARCHITECTURES[machine]), name.encode())
        ours = numbers[list(ARCHITECTURES).index(machine)]
        assert said == ours or (said < 0 and (ours is None or name in TOO_NEW)), name


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_are_answered_by_their_list_and_their_arguments(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    for calls, error in ((ABSENT, errno.ENOSYS), (FORBIDDEN, errno.EPERM)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                assert answer(machine, number) == ERROR | error
    number = {name: numbers[column] for name, numbers in CALLS_BY_ARGUMENT.items()}
    thread, shared_file, shared_memory = 0x3D0F00, 0x1, 0x21
    for name, arguments, wanted in (
        ("clone", (thread,), ALLOW), ("clone", (17,), ALLOW), ("clone", (0x10000000 | 17,), ERROR | errno.EPERM),
        ("clone", (0x40000000 | 17,), ERROR | errno.EPERM), ("mmap", (0, 0, 0, 0x22), ALLOW),
        ("mmap", (0, 0, 0, shared_file), ALLOW), ("mmap", (0, 0, 0, shared_memory), ERROR | errno.EPERM),
        ("prlimit64", (0, 7), ALLOW), ("prlimit64", (1, 7), ERROR | errno.EPERM), ("socket", (1,), ALLOW),
        ("socket", (2,), ERROR | errno.EAFNOSUPPORT), ("socket", (40,), ERROR | errno.EAFNOSUPPORT),
        ("socketpair", (1,), ALLOW), ("ioctl", (0, 0x5412), ERROR | errno.EPERM), ("ioctl", (0, 0x5413), ALLOW),
        ("setsockopt", (0, 1, 7), ERROR), ("setsockopt", (0, 1, 2), ALLOW),
    ):  # fmt: skip
        assert answer(machine, number[name], *arguments) == wanted, (name, arguments)
    read, x32 = (0, 63)[column], 0x40000000
    assert answer(machine, read) == ALLOW
    assert answer(machine, 463) == answer(machine, x32) == ERROR | errno.ENOSYS
    assert answer(machine, read, architecture=0x40000003) == KILL


def test_another_architecture_has_no_filter_and_no_sandbox() -> None:
    with pytest.raises(OSError, match="no seccomp filter is written for riscv64, only for x86_64 and aarch64"):
        filter_of("riscv64")
