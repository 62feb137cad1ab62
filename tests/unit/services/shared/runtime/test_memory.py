"""Freed memory goes back to the system."""

import ctypes
import platform

import psutil
import pytest

from gspo_services.broker.upkeep import return_freed_memory

MIB = 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it, and can be asked for it")
def test_memory_that_a_burst_has_left_below_a_block_in_use_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
    blocks = [libc.malloc(8192) for _ in range(64 * MIB // 8192)]
    for block in blocks:
        ctypes.memset(block, 1, 8192)
    for block in blocks[:-1]:
        libc.free(block)
    held = psutil.Process().memory_info().rss
    return_freed_memory()
    released = held - psutil.Process().memory_info().rss
    libc.free(blocks[-1])
    assert released > 48 * MIB, released
