"""Makes /sandbox/work of /sandbox/tool/files, and puts this interpreter into PATH as "python". It runs in the sandbox."""

import sys

del sys.path[0]  # beside this file nothing is ours to import

import json  # noqa: E402
import os  # noqa: E402

WORK, PROGRAMS = "/sandbox/work", "/sandbox/bin"

os.makedirs(WORK)
os.makedirs(PROGRAMS)
for name in ("python", "python3"):
    os.symlink(sys.executable, os.path.join(PROGRAMS, name))
with open("/sandbox/tool/files", "rb") as file:
    header = json.loads(file.readline())
    links = []
    for path, kind, mode, mtime_ns, size in header["entries"]:
        content, place = file.read(size), os.path.join(WORK, path)
        if kind == "folder":
            os.makedirs(place, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if kind == "link":
            links.append((content, place))
            continue
        with open(place, "xb") as made:
            made.write(content)
        os.chmod(place, mode)
        os.utime(place, ns=(mtime_ns, mtime_ns))
# The last: no file above may be written through one.
for target, place in links:
    os.symlink(target, os.fsencode(place))
os.unlink("/sandbox/tool/files")
