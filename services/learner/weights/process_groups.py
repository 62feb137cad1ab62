"""Process groups of two, this learner and one engine, from which SGLang's update_weights_from_distributed receives.

Rank 0 is the learner, rank 1 the engine. A group is made beside torch's default one, as SGLang makes its own half, so that
DeepSpeed never sees it. One thread owns it: an error there ends the group and nothing else. An engine that waits for a
broadcast notices at once, because its connection is closed.
"""

import queue
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from protocol.sessions import shown_identity
from services.learner.weights.snapshot import Snapshot

log = structlog.get_logger()

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_QUEUED: Final = 64
TIMEOUT_S: Final = 60.0
"""Time for the engine to join, and to take one broadcast."""
UNASKED_S: Final = 60.0
"""Time for a rollout to ask for the promised version. It may be gone while its engine waits for the broadcast."""
CLOSE_S: Final = 2.0
"""Time for all groups to close."""
IDLE_S: Final = 1800.0
"""A group that sends nothing for this long is closed: its engine may be gone, or fetch chunks by now."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """``backend``: that of the engine's device. ``device``: the one from which this process sends."""

    backend: Literal["gloo", "nccl"]
    device: str = "cpu"
    timeout_s: float = TIMEOUT_S
    unasked_s: float = UNASKED_S


def group_options(backend: Literal["", "gloo", "nccl"]) -> GroupOptions | None:
    """The options for the setting learner.weights_group_backend; None: no groups. NCCL sends from this process's GPU."""
    if not backend:
        return None
    return GroupOptions(backend=backend, device=f"cuda:{torch.cuda.current_device()}" if backend == "nccl" else "cpu")


class SendingGroup:
    """One group, from the moment when its store can be reached.

    produces:     broadcasts
    waits for:    the engine; ``send``
    unblocked by: the engine; ``close``; the options' ``timeout_s``; ``unasked_s`` or twice that; IDLE_S
    """

    def __init__(self, options: GroupOptions) -> None:
        """Raises: RuntimeError when no port can be bound."""
        self.name = f"weights-{uuid.uuid4().hex}"
        self.promised: Snapshot | None = None
        """The version that will be sent next; kept so that it is not dropped before."""
        self._options = options
        self._timeout = timedelta(seconds=options.timeout_s)
        # The store listens on every address, as torch's own rendezvous does.
        self._store = TCPStore("0.0.0.0", 0, 2, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self.port: int = self._store.port
        self._queue: queue.Queue[Bytes | None] = queue.Queue(MAX_QUEUED)
        self._ended = threading.Event()
        # A daemon: a broadcast that nobody takes must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the group can send nothing more."""
        return self._ended.is_set()

    def send(self, data: Bytes) -> None:
        """Broadcast ``data``, uint8 [n], once the engine has joined and earlier broadcasts have arrived. Returns at once.

        If ``data`` cannot be sent any more, the group closes, which the engine notices.
        """
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            self.close()

    def close(self) -> None:
        """Send nothing more and close the connections. A second call does nothing."""
        self._ended.set()
        self.promised = None
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            # The thread looks at ``ended`` after each broadcast.
            return

    def wait_closed(self, timeout_s: float) -> None:
        """Wait for the end of the connections, which close when the broadcast under way has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._serve()
        except RuntimeError as error:
            log.warning("weights_group_failed", group=self.name, error=str(error).partition("\n")[0][:500])
        except queue.Empty:
            log.info("weights_group_idle", group=self.name)
        finally:
            self._ended.set()
            self.promised = None

    def _serve(self) -> None:
        """Send until closed. Raises: RuntimeError, torch's error for any failure between ranks; queue.Empty when idle."""
        store = PrefixStore(self.name, self._store)
        group, _ = _new_process_group_helper(
            2, 0, [], Backend(self._options.backend), store, group_name=GroupName(self.name), timeout=self._timeout
        )
        _world.pg_group_ranks[group] = {0: 0, 1: 1}
        try:
            while (data := self._next()) is not None and not self._ended.is_set():
                tensor = torch.from_numpy(data).to(self._options.device)
                dist.broadcast(tensor, src=0, group=group)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
        finally:
            # The learner's end destroys every group, in another thread: then this one is gone.
            with suppress(ValueError):
                dist.destroy_process_group(group)
            # The connections of a group close with the last reference to it.
            del group

    def _next(self) -> Bytes | None:
        """The next broadcast. Raises: RuntimeError when nobody asks for a promised version; queue.Empty when idle."""
        idle_s, unasked = 0.0, 0
        while True:
            try:
                return self._queue.get(timeout=self._options.unasked_s)
            except queue.Empty:
                idle_s += self._options.unasked_s
                if idle_s >= IDLE_S:
                    raise
            promised = self.promised
            version = 0 if promised is None else promised.policy_version
            if version and version == unasked:
                raise RuntimeError(f"nobody asked for version {version}, which was promised")
            unasked = version


class SendingGroups:
    """At most one group for each rollout."""

    def __init__(self, options: GroupOptions, *, kind: type[SendingGroup] = SendingGroup) -> None:
        """``kind``: the class of the groups."""
        self.backend = options.backend
        self._options = options
        self._kind = kind
        self._groups: dict[bytes, SendingGroup] = {}

    def ready(self, peer: bytes, name: str) -> SendingGroup:
        """The group ``name`` of ``peer``, or a new one if that does not exist (any more).

        Raises: RuntimeError when no port can be bound.
        """
        group = self._groups.get(peer)
        if group is not None and group.name == name and not group.ended:
            return group
        self.leave(peer)
        # Rollouts disappear without notice.
        self._groups = {known: each for known, each in self._groups.items() if not each.ended}
        made = self._groups[peer] = self._kind(self._options)
        log.info("weights_group_opened", peer=shown_identity(peer), group=made.name, port=made.port)
        return made

    def get(self, peer: bytes, name: str) -> SendingGroup | None:
        """The group ``name`` of ``peer``; None: it does not exist (any more)."""
        group = self._groups.get(peer)
        return group if group is not None and group.name == name and not group.ended else None

    def leave(self, peer: bytes) -> None:
        """Close the group of ``peer``, if there is one."""
        group = self._groups.pop(peer, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        """Close all groups. Those without a broadcast under way have closed when this returns: torch's own end aborts the
        process if a group is left in another thread.
        """
        closing = list(self._groups.values())
        for peer in list(self._groups):
            self.leave(peer)
        end = time.monotonic() + CLOSE_S
        for group in closing:
            group.wait_closed(max(0.0, end - time.monotonic()))
