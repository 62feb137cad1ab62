"""Checks of this machine: the run's directory, room on disks, ports, keys."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gspo_services.broker.store import LEDGER_FILE, lock_holder
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import ReadModel, Situation
from gspo_services.prepare.ports import can_bind, port_ranges
from gspo_services.shared.estimates import gib, trained_parameters
from gspo_services.shared.net import Security
from gspo_services.shared.placement import require_bfloat16, require_driver, require_kernels
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.runtime.private_files import open_to_all
from gspo_services.shared.settings import EXPOSED, SandboxSection, is_private, read_run_settings, run_fingerprint
from gspo_services.tasks.sandbox import (
    CGROUP_WAY_OUT,
    NO_CGROUP,
    LocalSandboxes,
    SandboxError,
    SandboxLimits,
    open_configured,
)

ACQUIRE_TIMEOUT_S: Final = 0.5
"""For servers of sandboxes, which should be there by now."""
TOKEN_BYTES: Final = 24
"""Of one token in the ledger: id, log-prob, index and what a page wastes."""


def machine_findings(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    """Everything that must be free, writable or there when the run starts."""
    yield from _builds(situation)
    yield from _bfloat16(situation)
    yield from _ports(situation)
    yield from _keys(situation)
    yield from _sandboxes(situation)
    if not situation.elsewhere:
        yield from _directory(situation)
        yield from _room(situation, model)


def _builds(situation: Situation) -> Iterator[Finding]:
    """A driver that is too old for this Python's torch, and kernels of SGLang for another CUDA; nothing about any other."""
    if situation.elsewhere or situation.hardware.is_named:
        return
    rollout = situation.settings.rollout
    has_server_elsewhere = bool(rollout.python or rollout.server_url)
    for name, require in (("driver", require_driver), ("kernels", require_kernels)):
        if name == "kernels" and has_server_elsewhere:
            continue
        try:
            require()
        except ConfigurationError as error:
            yield _refused(name, error)


def _bfloat16(situation: Situation) -> Iterator[Finding]:
    """A GPU that has no bfloat16, where the run asks for it."""
    device = situation.hardware.device
    if device is None or device.capability is None:
        return
    try:
        require_bfloat16(situation.settings, device.name, device.capability)
    except ConfigurationError as error:
        yield _refused("bfloat16", error)


def _refused(check: str, error: ConfigurationError) -> Finding:
    """What a process would say as it starts, with the way out."""
    text, _, way_out = str(error).partition("; ")
    return Finding(check=check, status="fail", text=text, way_out=way_out)


def _sandboxes(situation: Situation) -> Iterator[Finding]:
    """Whether a program runs where the section ``[sandbox]`` says; nothing for a configuration that does not say it."""
    section = situation.settings.sandbox
    if section == SandboxSection() and not situation.settings.agent.computer:
        return
    where = ", ".join(section.urls) or "bubblewrap on this machine"
    if situation.elsewhere:
        yield Finding(check="sandbox", status="note", text=f"{where}: not tried, the run will be on other machines")
        return
    try:
        said, memory = asyncio.run(_program(section.model_copy(update={"acquire_timeout_s": ACQUIRE_TIMEOUT_S, "warm": 0})))
    except (ConfigurationError, SandboxError) as error:
        text, _, out = str(error).partition("\n")
        yield Finding(
            check="sandbox", status="fail", text=text, basis="tried",
            way_out=out or "correct sandbox.urls, or start `gspo sandbox` there; `gspo sandbox CONFIG --try` says more",
        )  # fmt: skip
        return
    yield Finding(check="sandbox", status="ok", text=f"{where} runs Python {said}", basis="tried")
    if memory.startswith(NO_CGROUP):
        yield Finding(
            check="sandbox", status="note", text=f"memory of programs: {memory}", way_out=CGROUP_WAY_OUT, basis="tried"
        )
    elif memory:
        yield Finding(check="sandbox", status="ok", text=f"memory of programs: {memory}", basis="tried")


async def _program(section: SandboxSection) -> tuple[str, str]:
    """What a small program prints in the sandbox, and what counts its memory, where that is said here.

    Raises: ConfigurationError; SandboxError.
    """
    async with open_configured(section) as sandboxes, sandboxes.acquire() as sandbox:
        await sandbox.put({"version.py": b"import sys\nprint(sys.version.split()[0])\n"})
        outcome = await sandbox.run(["python", "version.py"], SandboxLimits())
        memory = sandboxes.memory if isinstance(sandboxes, LocalSandboxes) else ""
        return one_line(outcome.stdout.decode(errors="replace").strip(), 40), memory


def nearest_folder(path: Path) -> Path:
    """The deepest folder of ``path`` that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _directory(situation: Situation) -> Iterator[Finding]:
    settings = situation.settings
    directory = settings.run.directory
    folder = nearest_folder(directory)
    if not folder.is_dir():
        yield Finding(
            check="run directory", status="fail", text=f"run.directory is {directory}: {folder} is a file",
            way_out="choose another run.directory",
        )  # fmt: skip
        return
    if not os.access(folder, os.W_OK | os.X_OK) or _is_read_only(folder):
        yield Finding(
            check="run directory", status="fail", text=f"run.directory is {directory}: {folder} cannot be written",
            way_out="make it writable, or choose another run.directory",
        )  # fmt: skip
        return
    if not (directory / "settings.json").exists():
        yield Finding(check="run directory", status="ok", text=f"{directory}: a new run")
        return
    try:
        before = read_run_settings(directory)
    except ConfigurationError as error:
        yield Finding(check="run directory", status="fail", text=str(error), way_out="choose another run.directory")
        return
    if run_fingerprint(before) != run_fingerprint(settings):
        sections = ("run", "model", "environment", "reward", "agent", "batch")
        different = [name for name in sections if getattr(before, name) != getattr(settings, name)]
        yield Finding(
            check="run directory", status="fail",
            text=f"{directory} holds a run with other settings ({', '.join(different)}), which these cannot continue",
            way_out="--set run.directory=runs/NEW begins a new run; or go back to the settings of the old one",
        )  # fmt: skip
        return
    if said := open_to_all(directory):
        what, _, way_out = said.rpartition(": ")
        yield Finding(check="run directory", status="warn", text=what, way_out=way_out)
    yield Finding(check="run directory", status="note", text=f"{directory} holds a run with these settings: it is continued")


def _is_read_only(folder: Path) -> bool:
    """Root may write everywhere, but not on a file system that is mounted read-only."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _room(situation: Situation, model: ReadModel) -> Iterator[Finding]:
    settings, shape = situation.settings, model.shape
    if shape is None:
        return
    size = 2 if settings.model.dtype == "bfloat16" else 4
    tokens = settings.batch.groups_per_batch * settings.batch.group_size * settings.largest_sampling.max_tokens
    batches = min(settings.run.num_batches, settings.broker.keep_batches or settings.run.num_batches)
    kept = 12.0 * trained_parameters(shape, settings) * (settings.learner.keep_checkpoints + 1) + size * shape.parameters
    ledger = float(TOKEN_BYTES * tokens * batches)
    yield _disk("disk", nearest_folder(settings.run.directory), kept + ledger, "checkpoints, export and ledger")
    files = size * shape.parameters * max(1, settings.rollout.num_servers)
    yield _disk("weights directory", nearest_folder(settings.rollout.weights_directory), float(files), "versions to load")


def _disk(check: str, folder: Path, needed: float, what: str) -> Finding:
    free = float(shutil.disk_usage(folder).free)
    text = f"{what}: at most {gib(needed)}; {folder} has {gib(free)} free"
    if needed <= free:
        return Finding(check=check, status="ok", text=text, basis="estimated")
    key = "run.directory" if check == "disk" else "rollout.weights_directory"
    return Finding(
        check=check, status="fail" if needed > 4 * free else "warn", text=text, basis="estimated",
        way_out=f"make room, or set {key} to a larger disk",
    )  # fmt: skip


def _endpoints(situation: Situation) -> dict[str, str]:
    settings = situation.settings
    return {
        "broker.work_endpoint": settings.broker.work_endpoint,
        "broker.batch_endpoint": settings.broker.batch_endpoint,
        "learner.weights_endpoint": settings.learner.weights_endpoint,
    }


def _listening(situation: Situation) -> dict[str, tuple[str, int]]:
    """Host and port of everything that will listen on this machine, by setting; port 0 finds itself."""
    settings = situation.settings
    places = {}
    for key, endpoint in _endpoints(situation).items():
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        # A broker of several addresses has its own in its own configuration.
        if endpoint.startswith("tcp://") and port.isdecimal() and "," not in endpoint:
            places[key] = (host.strip("[]"), int(port))
    if "learner.weights_endpoint" in places:
        own, first = places["learner.weights_endpoint"]
        # Each rank serves its part of the weights.
        more = range(1, settings.learner.num_ranks)
        places |= {f"learner.weights_endpoint + {rank}": (own, first + rank) for rank in more}
    host = settings.security.metrics_host
    places["broker.metrics_port"] = (host, settings.broker.metrics_port)
    places["learner.metrics_port"] = (host, settings.learner.metrics_port)
    for index in range(settings.rollout.num_servers):
        suffix = f" + {index}" if index else ""
        for key, place, first in (
            ("rollout.metrics_port", host, settings.rollout.metrics_port),
            ("agent.port", settings.agent.host, settings.agent.port if settings.agent.is_used else 0),
        ):
            places[key + suffix] = (place, first + index if first else 0)
    if settings.rollout.server_port and not settings.rollout.server_url:
        places["rollout.server_port"] = ("127.0.0.1", settings.rollout.server_port)
    return {key: (host, port) for key, (host, port) in places.items() if port}


def _ports(situation: Situation) -> Iterator[Finding]:
    settings = situation.settings
    places = _listening(situation)
    if settings.rollout.num_servers > 1 and (settings.rollout.server_port or settings.rollout.server_url):
        yield Finding(
            check="ports", status="fail",
            text=f"rollout.num_servers is {settings.rollout.num_servers}, and server_port or server_url names one server",
            way_out="set rollout.num_servers = 1, or leave the server's port and URL out",
        )  # fmt: skip
    numbers = Counter(port for _, port in places.values())
    if not situation.elsewhere:
        for port, times in numbers.items():
            if times > 1:
                keys = [key for key, (_, own) in places.items() if own == port]
                yield Finding(
                    check="ports",
                    status="fail",
                    text=f"{' and '.join(keys)} are both {port}",
                    way_out="give each its own, or 0",
                )
    if situation.elsewhere or _is_running(situation):
        where = "other machines" if situation.elsewhere else "the run that goes on in run.directory"
        yield Finding(check="ports", status="note", text=f"{len(places)}, on {where}: not tried")
        return
    taken = {key: port for key, (host, port) in places.items() if not can_bind(host, port)}
    moving = {each.key for each in port_ranges(settings)}
    stuck = {key: port for key, port in taken.items() if key.partition(" ")[0] not in moving}
    if stuck:
        yield Finding(
            check="ports", status="fail", text=f"taken by other processes: {_listed(stuck)}", basis="tried",
            way_out="end what listens there (`ss -ltnp` names it; perhaps another run), or set other ports",
        )  # fmt: skip
    elif taken:
        text = f"taken by other processes, perhaps another run: {_listed(taken)}; gspo run takes others and says which"
        yield Finding(check="ports", status="note", text=text, basis="tried")
    if not taken and max(numbers.values(), default=1) == 1:
        yield Finding(check="ports", status="ok", text=f"{len(places)} are free", basis="tried")


def _listed(ports: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {port}" for key, port in ports.items())


def _is_running(situation: Situation) -> bool:
    """Whether a broker has the ledger of run.directory, and so its ports."""
    return lock_holder(situation.settings.run.directory / LEDGER_FILE) is not None


def _keys(situation: Situation) -> Iterator[Finding]:
    section = situation.settings.security
    exposed = [key for key, endpoint in _endpoints(situation).items() if not is_private(endpoint)]
    if not section.keys:
        if exposed:
            yield Finding(
                check="keys", status="warn", text=f"no keys, and other hosts reach {', '.join(exposed)}",
                way_out=EXPOSED.rpartition(";")[2].strip(),
            )  # fmt: skip
        return
    directory = Path(section.keys)
    if not directory.is_dir():
        yield situation.missing(
            "keys", f"security.keys is {directory}: no such directory.", f"`gspo keys {directory}` makes keys"
        )
        return
    try:
        names = [Security.load(section, role).own for role in ("broker", "learner", "rollout", "operator")]
    except ConfigurationError as error:
        # On several hosts each has its own secret only.
        missing = situation.missing("keys", str(error), f"`gspo keys {directory}` makes keys")
        yield missing
        return
    yield Finding(check="keys", status="ok", text=f"{directory}: {', '.join(own.name for own in names if own is not None)}")
