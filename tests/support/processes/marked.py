"""Supervised processes that are still there."""

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
