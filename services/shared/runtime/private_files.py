"""Files of a run are for the user who runs it: they hold what models and agents say, and keys."""

import os
import stat
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o077
SHARED: Final = 0o007


def keep_private(*places: Path) -> None:
    """From now on this process creates files for its user alone, whatever its umask was; its processes inherit that.

    For its group, too, where every one of ``places``, or what there is above it, is a folder that gives its files to its
    group: setgid and writable for it, as Kubernetes makes the volumes of pods with an fsGroup, and a user who wants that.
    """
    os.umask(SHARED if places and all(_is_of_a_group(place) for place in places) else PRIVATE)


def open_to_all(directory: Path) -> str:
    """What to say of a directory that all users of the machine may look into; empty for any other."""
    try:
        is_open = directory.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH)
        is_reached = all(parent.stat().st_mode & stat.S_IXOTH for parent in directory.absolute().parents)
    except OSError:
        return ""
    return f"all users of this machine can read {directory}: chmod o-rwx {directory}" if is_open and is_reached else ""


def _is_of_a_group(place: Path) -> bool:
    for folder in (place.absolute(), *place.absolute().parents):
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)
    return False
