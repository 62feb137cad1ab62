"""The command that starts init in a sandbox of bubblewrap. Pure, but for looking at what this machine has."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gspo_services.tasks.sandbox.interface import ProgramRefused

INIT: Final = Path(__file__).with_name("init")
INSIDE: Final = "/init/gspo_sandbox_init"
"""Init's folder as a program would see it. The name is nobody else's, as "services" may be."""
START: Final = (
    "import sys; sys.path.insert(0, '/init'); from gspo_sandbox_init.main import main; del sys.path[0]; main(sys.argv[1:])"
)
SANDBOX_BYTES: Final = 256 << 20
"""Of all files in ``/sandbox``; memory holds them."""
FIRST_USER: Final = 2_000_000_000
"""As root each sandbox has a user of its own from here on, which has no other process and owns no file."""
SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
"""What programs and compilers need of the system; nothing of it has a secret."""
VARIABLES: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


def bubblewrap_command(python: Path, read_only: Sequence[Path], user: int | None) -> list[str]:
    """The arguments that start init.

    ``read_only`` are folders that programs may read beside the system, at their own places. ``user`` is who init
    becomes, where this process is root.
    """
    command = [
        "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop" if user is None else "--cap-add", "ALL",
    ]  # fmt: skip
    if user is None:
        command += ["--unshare-user"]
    for place in SYSTEM:
        path = Path(place)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), place]
        elif path.exists():
            command += [*_parents(path), "--ro-bind", place, place]
    for path in read_only:
        command += [*_parents(path), "--ro-bind", str(path), str(path)]
    command += ["--perms", "0755", "--dir", "/init", "--ro-bind", str(INIT), INSIDE, "--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--tmpfs", "/tmp", "--perms", "0777", "--size", str(SANDBOX_BYTES), "--tmpfs", "/sandbox"]
    # Nobody needs terminals, which are the whole machine's. What is mapped of /dev/zero is memory that nothing counts, and
    # /dev/full reads the same.
    command += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts", "--dev-bind", "/dev/full", "/dev/zero"]
    # As an ordinary user a program owns /dev as well.
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in VARIABLES.items():
        command += ["--setenv", name, value]
    if user is not None:
        command += ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all"]
        command += ["--inh-caps=-all", "--no-new-privs"]
    return [*command, str(python), "-I", "-c", START]


def folders_of(python: Path) -> list[Path]:
    """Folders that an interpreter needs and that the system's own do not hold.

    Its own, and that of the interpreter that made its virtual environment. Raises: ProgramRefused.
    """
    found = [python.parent.parent]
    configuration = found[0] / "pyvenv.cfg"
    if configuration.is_file():
        for line in configuration.read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                found.append(Path(value.strip()).resolve().parent)
    for path in found:
        if path.is_relative_to("/tmp"):
            raise ProgramRefused(f"{path} is below /tmp, which every program has to itself: use an interpreter elsewhere")
    return [path for path in dict.fromkeys(found) if not path.is_relative_to("/usr")]


def _parents(path: Path) -> list[str]:
    """Folders on the way to a mount: without this they would be closed to everybody but root."""
    ways = [str(parent) for parent in reversed(path.parents) if str(parent) != "/"]
    return [word for way in ways for word in ("--perms", "0755", "--dir", way)]
