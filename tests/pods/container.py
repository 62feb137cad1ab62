"""What a container sees: a read-only copy of this machine's files with the pod's volumes in it, an unprivileged user, only
its own environment. One shell script, run inside the pod's mount namespace, does what kubelet and the container runtime do.
"""

import re
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.deploy.cluster import Object

REPOSITORY: Final = Path(__file__).parents[2]
DOCKERFILES: Final = REPOSITORY / "deploy" / "docker"
ENTRYPOINT: Final = ("gspo",)


def image_environment(image: str) -> dict[str, str]:
    """The environment that the last stage of the image's Dockerfile sets, with this machine's programs on its PATH."""
    name = image.rpartition("/")[2].partition(":")[0].removeprefix("gspo-")
    last_stage = (DOCKERFILES / f"{name}.Dockerfile").read_text().rpartition("\nFROM ")[2]
    found: dict[str, str] = {}
    for line in re.findall(r"^ENV (.*)$", last_stage, re.MULTILINE):
        found.update(word.split("=", 1) for word in shlex.split(line))
    return {**found, "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}


def environment(container: Object, fields: dict[str, str]) -> dict[str, str]:
    """The environment of image and container. ``fields``: the pod's fields that the container may refer to."""
    found = image_environment(container["image"])
    for entry in container.get("env", []):
        reference = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[entry["name"]] = fields[reference] if reference else entry["value"]
    return found


def arguments(container: Object, variables: dict[str, str]) -> list[str]:
    """The command line, with $(NAME) filled in."""
    words = [*container.get("command", ENTRYPOINT), *container.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]


def script(
    container: Object, security: Object, volumes: dict[str, Path | str], fields: dict[str, str], hosts: Path, root: Path
) -> str:
    """A shell script that becomes the container's process.

    ``volumes``: host directories by volume name, or the size of a memory file system. ``root``: an empty directory.
    """
    inner = root / "root"
    mounts = sorted(container.get("volumeMounts", []), key=lambda mount: str(mount["mountPath"]))
    variables = environment(container, fields)
    lines = [
        "set -e",
        f"hostname {fields['metadata.name']}",
        f"mount -t tmpfs tmpfs {root}",
        f"mkdir {root}/upper {root}/work {inner}",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={root}/upper,workdir={root}/work {inner}",
        *(f"chmod o+x {inner}{path}" for path in _closed_directories()),
        *(f"mkdir -p {inner}{mount['mountPath']}" for mount in mounts),
        *(f"mount --rbind /{name} {inner}/{name}" for name in ("proc", "sys", "dev")),
        f"mount --bind {hosts} {inner}/etc/hosts",
        f"mount -o remount,ro {inner}",
    ]
    for mount in mounts:
        lines += _mount(mount, volumes[mount["name"]], inner)
    lines += _visible(REPOSITORY, mounts, inner)
    # A container starts in its own directory, not in that of the test.
    words = [*_as_its_user(container, security, variables), *arguments(container, variables)]
    lines.append(f"cd / && exec chroot {inner} {shlex.join(words)}")
    return "\n".join(lines)


def entering(process: int, container: Object, security: Object, fields: dict[str, str], words: Sequence[str]) -> list[str]:
    """The command line of `kubectl exec`: ``words`` in the container that has this process."""
    variables = environment(container, fields)
    enter = ["nsenter", f"--target={process}", "--mount", "--uts", "--net", "--root"]
    return [*enter, *_as_its_user(container, security, variables), *words]


def _as_its_user(container: Object, security: Object, variables: dict[str, str]) -> list[str]:
    words = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}", "--clear-groups"]
    words += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "env", "-i"]
    words.append(f"--chdir={container.get('workingDir', '/')}")
    return words + [f"{name}={value}" for name, value in variables.items()]


def _mount(mount: Object, volume: Path | str, inner: Path) -> Sequence[str]:
    target = f"{inner}{mount['mountPath']}"
    if isinstance(volume, str):
        return [f"mount -t tmpfs -o size={volume},mode=1777 tmpfs {target}"]
    lines = [f"mount --bind {volume} {target}"]
    if mount.get("readOnly"):
        lines.append(f"mount -o remount,bind,ro {target}")
    return lines


def _visible(path: Path, mounts: Sequence[Object], inner: Path) -> Sequence[str]:
    """Keep the code visible under a volume that covers it, as when the repository is somewhere below /tmp."""
    if not any(path.is_relative_to(mount["mountPath"]) for mount in mounts):
        return []
    return [f"mkdir -p {inner}{path}", f"mount --bind {path} {inner}{path}", f"mount -o remount,bind,ro {inner}{path}"]


def _closed_directories() -> list[Path]:
    """Directories above Python and the code that an unprivileged user cannot enter; the container's copy opens them."""
    above = {parent for place in (Path(sys.base_prefix), REPOSITORY) for parent in (place, *place.parents)}
    return [path for path in sorted(above) if not path.stat().st_mode & stat.S_IXOTH]
