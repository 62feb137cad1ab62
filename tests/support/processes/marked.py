"""Supervised processes that are still there."""

import os
import select
from collections.abc import Iterable

import psutil

from gspo_services.shared.runtime.stray_processes import MARK


def left_of(*marks: str) -> list[int]:
    """Processes that carry one of these marks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) in marks:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def outliving(pids: Iterable[int], within_s: float = 20.0) -> list[int]:
    """Those of ``pids`` that do not end: a process that was killed goes on for a moment, while the kernel takes it down."""
    return [pid for pid in pids if not _ends(pid, within_s)]


def _ends(pid: int, within_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # Also when nobody collects its status.
        return bool(select.select([process], [], [], within_s)[0])
    finally:
        os.close(process)
