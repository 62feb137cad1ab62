"""Prints how /sandbox/work differs from /sandbox/tool/before. It runs in the sandbox, after programs that nobody has read.

Exit code 3: there is more than /sandbox/tool/before allows; standard error says what.
"""

import sys

del sys.path[0]  # beside this file a program may have left a "json.py"

import hashlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import stat  # noqa: E402

WORK = "/sandbox/work"
MOST_ENTRIES = 10000
MOST_PATH_BYTES = 1000
TOO_MUCH = 3


def refuse(text: str) -> None:
    """End with the reason."""
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(TOO_MUCH)


def walk(most_bytes: int) -> list[tuple[str, str, int, int]]:
    """Path, kind, mode and time of everything, sorted."""
    found: list[tuple[str, str, int, int]] = []
    # A command may remove its own working directory, or put something else there.
    folders, total = [""] if os.path.isdir(WORK) and not os.path.islink(WORK) else [], 0
    while folders:
        folder = folders.pop()
        place = os.path.join(WORK, folder)
        if not os.access(place, os.R_OK | os.X_OK):
            os.chmod(place, 0o755)
        for entry in os.scandir(place):
            path = os.path.join(folder, entry.name)
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                folders.append(path)
                found.append((path, "folder", 0o755, 0))
            elif stat.S_ISLNK(about.st_mode):
                found.append((path, "link", 0o777, 0))
            elif stat.S_ISREG(about.st_mode):
                total += about.st_size
                found.append((path, "file", about.st_mode & 0o777 | 0o600, about.st_mtime_ns))
            if len(found) > MOST_ENTRIES:
                refuse(f"more than {MOST_ENTRIES} files")
            if len(os.fsencode(path)) > MOST_PATH_BYTES:
                refuse(f"a path of more than {MOST_PATH_BYTES} bytes")
            if total > most_bytes:
                refuse(f"more than {most_bytes} bytes of files (agent.computer_bytes)")
    return sorted(found)


def main() -> None:
    """Print a line of JSON and the contents."""
    with open("/sandbox/tool/before", "rb") as file:
        asked = json.load(file)
    before, most_bytes = asked["entries"], asked["most_bytes"]
    found = walk(most_bytes)
    entries, contents = [], []
    for path, kind, mode, mtime_ns in found:
        content, place = b"", os.path.join(WORK, path)
        if kind == "link":
            content = os.fsencode(os.readlink(place))
        elif kind == "file":
            if not os.access(place, os.R_OK):
                os.chmod(place, mode)
            with open(place, "rb") as file:
                content = file.read(most_bytes)
        if before.get(path) != [kind, mode, mtime_ns, hashlib.sha256(content).hexdigest()]:
            entries.append([path, kind, mode, mtime_ns, len(content)])
            contents.append(content)
    there = {path for path, *_ in found}
    header = {"removed": [path for path in before if path not in there], "entries": entries}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for content in contents:
        sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


main()
