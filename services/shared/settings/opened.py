"""What each process of a run opens and calls, from its settings alone: a pod must mount the one and may reach the other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from gspo_services.shared.settings.sections import Settings

Process: TypeAlias = Literal["broker", "rollout", "learner"]
SPLIT_OPTIONS: Final = {"train_path": "train", "sources": "train", "eval_path": "eval"}
"""Options of environments with files, and the split whose tasks they are; the rest is opened with the environment."""
KEY_FILES: Final[dict[Process, tuple[str, ...]]] = {
    "broker": ("broker.secret", "rollout*.public", "learner*.public"),
    "rollout": ("rollout*.secret", "broker*.public", "learner*.public"),
    "learner": ("learner.secret", "broker*.public", "rollout*.public"),
}
"""By process: its own key, and those of whom it connects to or admits, each perhaps with a suffix."""
ENVIRONMENTS_OWN: Final = ("testlib_path",)
"""Options whose file a rollout opens too, because it has the environment without its tasks."""


@dataclass(frozen=True, kw_only=True)
class OpenedPath:
    """A file or directory that a process opens."""

    setting: str
    """The setting that names it; empty for what libraries open."""
    path: str
    writes: bool = False
    lasts: bool = False
    """What is written there must outlive the process."""
    files: tuple[str, ...] = ()
    """Patterns of the files that it must hold."""


@dataclass(frozen=True, kw_only=True)
class CalledAddress:
    """An address that a process connects to."""

    setting: str
    address: str
    """A URL with host and port. Commas separate those that are tried in turn."""
    process: Process | None = None
    """Who answers there; None: somebody outside of the run."""


def opened_paths(settings: Settings, process: Process) -> Iterator[OpenedPath]:
    """What ``process`` opens, beside its configuration and what is in its image."""
    yield OpenedPath(setting="", path="/tmp", writes=True)
    lasts = process != "rollout"  # A rollout keeps its server's log there.
    yield OpenedPath(setting="run.directory", path=str(settings.run.directory), writes=True, lasts=lasts)
    if settings.security.keys:
        # Rank 0 connects to the other ranks.
        own = (
            ("learner.public",)
            if process == "learner" and settings.learner.num_ranks * settings.learner.num_nodes > 1
            else ()
        )
        yield OpenedPath(setting="security.keys", path=settings.security.keys, files=(*KEY_FILES[process], *own))
    if process == "broker":
        yield from _tasks(settings)
        return
    yield OpenedPath(setting="model.path", path=str(settings.model.path))
    # Compiled kernels; shared memory of SGLang's processes and of NCCL.
    yield OpenedPath(setting="", path="/home/gspo", writes=True)
    yield OpenedPath(setting="", path="/dev/shm", writes=True)
    if process == "learner" and settings.distillation.directory:
        yield OpenedPath(setting="distillation.teacher", path=settings.distillation.directory)
    if process == "rollout":
        weights = str(settings.rollout.weights_directory)
        yield OpenedPath(setting="rollout.weights_directory", path=weights, writes=True)
        if settings.reward.model:
            yield OpenedPath(setting="reward.model", path=settings.reward.model)
        yield from _of_options("environment.options", settings.environment.options, ENVIRONMENTS_OWN)


def called_addresses(settings: Settings, process: Process) -> Iterator[CalledAddress]:
    """What ``process`` connects to; code of the user's own may call more."""
    if process == "rollout":
        yield CalledAddress(setting="broker.work_endpoint", address=settings.broker.work_endpoint, process="broker")
        # The broker says where: what this setting is for the learner.
        weights = settings.learner.advertised_weights_endpoint or settings.learner.weights_endpoint
        yield CalledAddress(setting="learner.advertised_weights_endpoint", address=weights, process="learner")
        if own := settings.rollout.peer_weights_endpoint:
            yield CalledAddress(setting="rollout.peer_weights_endpoint", address=own, process="rollout")
        outside = {
            "rollout.server_url": settings.rollout.server_url,
            "agent.url": settings.agent.url,
            "environment.options.reward_url": str(settings.environment.options.get("reward_url", "")),
            **{f"sandbox.urls[{number}]": url for number, url in enumerate(settings.sandbox.urls)},
        }
        for setting, address in outside.items():
            if address:
                yield CalledAddress(setting=setting, address=address)
    if process == "learner":
        if settings.distillation.url:
            yield CalledAddress(setting="distillation.teacher", address=settings.distillation.url)
        if settings.learner.node_rank == 0:
            yield CalledAddress(setting="broker.batch_endpoint", address=settings.broker.batch_endpoint, process="broker")
        if settings.learner.num_nodes > 1:
            met = f"tcp://{settings.learner.rendezvous_address}"
            yield CalledAddress(setting="learner.rendezvous_address", address=met, process="learner")


def named_code(settings: Settings, process: Process) -> Iterator[tuple[str, str]]:
    """Settings that name a class or function of the user's own, and its module, which ``process`` imports."""
    named: dict[str, object] = {"environment.name": settings.environment.name}
    if process == "rollout":
        named["environment.options.reward"] = settings.environment.options.get("reward")
        named["agent.function"] = settings.agent.function
    for setting, name in named.items() if process != "learner" else ():
        module, colon, _ = str(name or "").partition(":")
        if colon and module.partition(".")[0] not in ("gspo", "gspo_services"):
            yield setting, module


def _tasks(settings: Settings) -> Iterator[OpenedPath]:
    """The tasks that a broker reads: to train on, and those that are held out."""
    evaluates = settings.evaluation.every_batches > 0
    splits = {"train", "eval"} if evaluates and not settings.evaluation.sets else {"train"}
    options = settings.environment.options
    yield from _of_options("environment.options", options, _of_splits(options, splits))
    for name, chosen in settings.evaluation.in_runs().items():
        own = settings.for_set(chosen).environment.options
        yield from _of_options(f"evaluation.sets.{name}.options", own, _of_splits(own, {chosen.split}))


def _of_splits(options: Mapping[str, Any], splits: set[str]) -> tuple[str, ...]:
    return tuple(name for name in options if SPLIT_OPTIONS.get(name) in (None, *splits))


def _of_options(setting: str, options: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[OpenedPath]:
    for name in names:
        for way, text in _texts(name, options.get(name)):
            if text.startswith("/") or (way.endswith("path") and text):
                yield OpenedPath(setting=f"{setting}.{way}", path=text)


def _texts(way: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text below ``value``, with the way to it."""
    if isinstance(value, str):
        yield way, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(f"{way}.{key}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _texts(f"{way}[{index}]", each)
