"""Roots of a stranger's machine: Debian packages that the README lists, an ordinary user, nothing of this machine."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
README_LISTS = ("python3", "python3-venv", "make")
"""What the README names, as Debian calls it."""
BASE = ("ca-certificates", "git", "gpgv")
"""What a machine has from which somebody cloned this checkout."""
LIBRARIES = ("libssl3", "libsqlite3-0", "libffi8", "libbz2-1.0", "liblzma5", "libreadline8", "zlib1g")
"""Those of a Python that uv would bring with it."""

ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind -o ro /sys "$1/sys"
mount -t tmpfs tmpfs "$1/dev"
for name in null zero full random urandom tty; do touch "$1/dev/$name"; mount --bind /dev/$name "$1/dev/$name"; done
mkdir "$1/dev/shm" "$1/dev/pts"
mount -t tmpfs tmpfs "$1/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$1/dev/pts"
ln -s pts/ptmx "$1/dev/ptmx"
ln -s /proc/self/fd "$1/dev/fd"
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${stream%:*}" "$1/dev/${stream#*:}"; done
[ -z "$4" ] || mount -t tmpfs -o "size=$4,uid=1000,gid=1000" tmpfs "$1$2"
/usr/sbin/chroot --userspec="$6" "$1" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$5" USER=user LANG=C.UTF-8 \
    sh -c 'cd "$1" && eval "$2"' sh "$2" "$3" || exit $?
"""
"""Arguments: the root, the working directory in it, the command, the size of a fresh disk there or nothing, home, user.

The last command is not the shell's successor: `unshare --kill-child` would lose its hold on a process that changes its user.
"""


@dataclass
class Outcome:
    """What a command in a root did."""

    status: int
    output: str
    seconds: float
    received_bytes: int
    """By all network interfaces of this machine meanwhile, loopback left out."""


@dataclass
class Machine:
    """A root, made when it is first entered, with the checkout's last commit in the user's home."""

    folder: Path
    suite: str
    packages: Sequence[str] = (*BASE, *README_LISTS)
    checkout: str = "/home/user/gspo"
    uv_python: Path | None = None
    """A Python's prefix that stands in the place of uv's own."""
    lines: list[str] = field(default_factory=list)
    """What is reported of it."""

    def make(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        archive = self.folder.with_suffix(".tar")
        packages = f"--include={','.join(self.packages)}"
        if not archive.exists():  # Kept for the next time; delete it for newer packages.
            call("mmdebstrap", "--quiet", "--variant=minbase", packages, self.suite, str(archive), MIRROR)
        self.folder.mkdir()
        call("tar", "-xf", str(archive), "-C", str(self.folder), "--exclude=./dev/*")
        call("chroot", str(self.folder), "useradd", "--create-home", "--uid", "1000", "--shell", "/bin/sh", "user")
        for name in ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt"):
            shutil.copy(f"/etc/{name}", self.folder / "etc" / name)  # How this machine reaches the network.
        if "SSL_CERT_FILE" in os.environ:
            # Its certificates, for a pip that brings its own.
            (self.folder / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        if self.uv_python is not None:
            self._put_uv(self.uv_python)
        call("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), f"{self.folder}{self.checkout}")
        call("chown", "-R", "1000:1000", f"{self.folder}/home/user")

    def run(
        self, command: str, timeout_s: float, *, disk: str = "", home: str = "/home/user", user: str = "1000:1000"
    ) -> Outcome:
        """Run a shell command in the checkout as the ordinary user, with an empty environment."""
        before, started = received(), time.monotonic()
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
        done = subprocess.run(
            [*enter, str(self.folder), self.checkout, command, disk, home, user],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=timeout_s,
        )  # fmt: skip
        return Outcome(done.returncode, done.stdout, time.monotonic() - started, received() - before)

    def install(self, packages: Sequence[str]) -> None:
        """What a message told the user to install, as the administrator."""
        command = f"PATH=$PATH:/usr/sbin:/sbin; apt-get --quiet update && apt-get install --yes --quiet {' '.join(packages)}"
        done = self.run(command, 600, home="/root", user="0:0")
        assert done.status == 0, done.output

    def disk_bytes(self, name: str) -> int:
        """What a folder of the checkout takes."""
        return int(call("du", "--summarize", "--block-size=1", f"{self.folder}{self.checkout}/{name}").split()[0])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put_uv(self, prefix: Path) -> None:
        """uv itself, and in the place of the Python that `uv python install` brings, one of this machine."""
        shutil.copy(str(shutil.which("uv")), self.folder / "usr/local/bin/uv")
        version = call(str(prefix / "bin" / "python3"), "-c", "import platform; print(platform.python_version())").strip()
        place = self.folder / f"home/user/.local/share/uv/python/cpython-{version}-linux-x86_64-gnu"
        shutil.copytree(prefix, place, symlinks=True, ignore=shutil.ignore_patterns("site-packages", "test", "__pycache__"))
        # uv's own finds its library beside itself; this one looks where it was built.
        (self.folder / "etc/ld.so.conf.d/python.conf").write_text(f"/{place.relative_to(self.folder)}/lib\n")
        call("chroot", str(self.folder), "ldconfig")


def call(*words: str) -> str:
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


def received() -> int:
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")
