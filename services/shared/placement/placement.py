"""Assigns GPUs and cores to the learner and the servers of one machine, and refuses what cannot work."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from gspo_services.shared.placement.visible import Machine, this_machine, torch_is_for_cuda
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

MEMORY: Final = "--mem-fraction-static"
Side = Literal["learner", "rollout"]


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """What one process may use; None: the same as the process that starts it."""

    gpus: tuple[str, ...] | None = None
    """Names for CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return variables for the process. By default CUDA would number the fastest GPU first."""
        if self.gpus is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    @property
    def text(self) -> str:
        """Such as "GPU 2, cores 0 to 3"; empty when nothing was dealt."""
        parts = []
        if self.gpus is not None:
            parts.append(f"GPU{'s' if len(self.gpus) > 1 else ''} {', '.join(self.gpus)}" if self.gpus else "no GPU")
        if self.cores is not None:
            parts.append(f"core{'s' if len(self.cores) > 1 else ''} {_ranges(self.cores)}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The places of a run's processes on one machine."""

    learner: ProcessPlace
    rollouts: tuple[ProcessPlace, ...]

    @property
    def text(self) -> str:
        """Who is where, in one line; empty when nothing was assigned."""
        named = [("learner", self.learner), *((f"rollout-{index}", place) for index, place in enumerate(self.rollouts))]
        return "; ".join(f"{name}: {place.text}" for name, place in named if place.text)


def placement_of(settings: Settings, machine: Machine) -> Placement:
    """Where ``gspo run`` puts the learner's ranks and each server.

    Without ``learner.gpus`` and ``rollout.gpus``, a machine of several GPUs gives the first to the learner and the next to
    the servers, one for each of their ranks; a machine of one GPU gives it to all. Raises: ConfigurationError for GPUs or
    cores that are not there, that are named twice or do not go round, and for a GPU that a server shares without saying how
    much of its memory it takes.
    """
    num_servers = settings.rollout.num_servers
    learner, servers = _gpus(settings, machine)
    cores = {side: _chosen_cores(settings, side, machine) for side in ("learner", "rollout")}
    dealt = _dealt(cores["rollout"], num_servers) if cores["rollout"] else [None] * num_servers
    placement = Placement(
        learner=ProcessPlace(gpus=learner, cores=cores["learner"] or None),
        rollouts=tuple(ProcessPlace(gpus=gpus, cores=own) for gpus, own in zip(servers, dealt, strict=True)),
    )
    _require_shares(settings, placement)
    return placement


def is_for_cuda(settings: Settings) -> bool:
    """Whether the run's builds of torch can use a GPU. Those of other interpreters are taken to; this one's is looked at."""
    return bool(settings.learner.python or settings.rollout.python) or torch_is_for_cuda()


def machine_of(settings: Settings) -> Machine:
    """This machine; its GPUs do not count if only this Python is used and its torch is built for CPUs."""
    return this_machine(for_cuda=is_for_cuda(settings))


def require_pythons(settings: Settings) -> None:
    """Raises: ConfigurationError when ``learner.python`` or ``rollout.python`` is not a program on this machine."""
    for side, python in (("learner", settings.learner.python), ("rollout", settings.rollout.python)):
        path = Path(python)
        if python and not (path.is_file() and os.access(path, os.X_OK)):
            raise ConfigurationError(
                f"{side}.python is {python}: there is no such program; name the interpreter of an environment that has this "
                "project, such as /opt/learner/bin/python, or leave it out"
            )


def _gpus(settings: Settings, machine: Machine) -> tuple[tuple[str, ...] | None, list[tuple[str, ...] | None]]:
    """Return the learner's GPUs, and each server's."""
    ranks, num_servers = settings.learner.num_ranks, settings.rollout.num_servers
    each = settings.rollout.ranks_per_server
    own_servers = 0 if settings.rollout.server_url else num_servers
    for_ranks, for_servers = (_chosen_gpus(settings, side, machine) for side in ("learner", "rollout"))
    if for_ranks and len(for_ranks) != ranks:
        raise ConfigurationError(
            f"learner.gpus names {len(for_ranks)} and learner.num_ranks is {ranks}: each rank has one GPU; make them equal"
        )
    wanted = (0 if for_ranks else ranks, 0 if for_servers else own_servers * each)
    if machine.gpus and any(wanted):
        # The reward model's GPU has no name in its setting that CUDA_VISIBLE_DEVICES could change.
        of_model = settings.reward.model_device.removeprefix("cuda:")
        free = _free(machine, (*for_ranks, *for_servers, of_model), wanted, each)
        for_ranks = for_ranks or tuple(free[: wanted[0]])
        for_servers = for_servers or tuple(dict.fromkeys(free[wanted[0] :][: wanted[1]]))
    if not (own_servers and for_servers):
        return for_ranks or None, [None] * num_servers
    if len(for_servers) % each:
        raise ConfigurationError(
            f"rollout.gpus names {len(for_servers)}, and a server takes {each} (rollout.tensor_parallel x data_parallel): "
            f"name {len(for_servers) // each * each or each}, or another multiple"
        )
    sets = [for_servers[begin : begin + each] for begin in range(0, len(for_servers), each)]
    if len(sets) > num_servers:
        raise ConfigurationError(
            f"rollout.gpus names {len(for_servers)} and rollout.num_servers is {num_servers}, with {each} for each: use "
            f"rollout.num_servers = {len(sets)}, name fewer GPUs, or raise rollout.tensor_parallel"
        )
    if num_servers % len(sets):
        groups = f"{len(sets)} GPUs" if each == 1 else f"{len(sets)} sets of {each} GPUs"
        raise ConfigurationError(
            f"rollout.num_servers is {num_servers}, which the {groups} of rollout.gpus do not divide: one "
            "would have more servers than another; make it a multiple"
        )
    return for_ranks or None, [sets[index % len(sets)] for index in range(num_servers)]


def _free(machine: Machine, taken: Sequence[str], wanted: tuple[int, int], each: int) -> list[str]:
    """As many GPUs as ranks and servers want, of those that nobody named; a machine's only GPU is for all.

    ``each``: GPUs of a server.
    """
    ranks, of_servers = wanted
    if len(machine.gpus) == 1 and ranks <= 1 and each == 1:
        return [*machine.gpus * (ranks + of_servers)]
    free = [name for name in machine.gpus if name not in taken]
    if ranks + of_servers > len(free):
        servers = of_servers // each
        who = [f"{ranks} rank{'s' * (ranks > 1)} of the learner"] * bool(ranks)
        who += [f"{servers} server{'s' * (servers > 1)}" + f" of {each} ranks" * (each > 1)] * bool(servers)
        raise ConfigurationError(
            f"{len(free)} of this machine's {len(machine.gpus)} GPUs are free, and {' and '.join(who)} want one each: lower "
            "learner.num_ranks or rollout.num_servers, or say with learner.gpus and rollout.gpus who shares one"
        )
    return free


def _chosen_gpus(settings: Settings, side: Side, machine: Machine) -> tuple[str, ...]:
    wanted = settings.learner.gpus if side == "learner" else settings.rollout.gpus
    _require_once(f"{side}.gpus", wanted)
    for number in wanted:
        if number >= len(machine.gpus):
            there = f"{len(machine.gpus)} are visible here, numbered from 0" if machine.gpus else "none is visible here"
            raise ConfigurationError(
                f"{side}.gpus names {number}: {there}; correct it, or CUDA_VISIBLE_DEVICES, among whose GPUs it counts"
            )
    return tuple(machine.gpus[number] for number in wanted)


def _chosen_cores(settings: Settings, side: Side, machine: Machine) -> tuple[int, ...]:
    wanted = settings.learner.cores if side == "learner" else settings.rollout.cores
    _require_once(f"{side}.cores", wanted)
    if missing := [core for core in wanted if core not in machine.cores]:
        raise ConfigurationError(
            f"{side}.cores names {missing[0]}, which this process may not use: it has {_ranges(machine.cores)}; correct it, "
            "or the container's limits"
        )
    return tuple(wanted)


def _require_once(key: str, wanted: Sequence[int]) -> None:
    if twice := [number for number, times in Counter(wanted).items() if times > 1]:
        raise ConfigurationError(f"{key} names {twice[0]} twice: name each once")


def _require_shares(settings: Settings, placement: Placement) -> None:
    """Two processes on one GPU must say who takes what, or time-share it: SGLang takes nearly all that it finds."""
    if settings.run.colocate:
        return
    users: dict[str, list[str]] = {}
    for name in placement.learner.gpus or ():
        users.setdefault(name, []).append("the learner")
    for index, place in enumerate(placement.rollouts):
        for name in place.gpus or ():
            users.setdefault(name, []).append(f"rollout-{index}")
    says = any(word.partition("=")[0] == MEMORY for word in settings.rollout.server_args)
    for name, who in users.items():
        if len(who) > 1 and not says:
            share = 0.8 / len(who)
            raise ConfigurationError(
                f"GPU {name} is for {' and '.join(who)}, and a server takes nearly all the memory that it finds: set "
                f'rollout.server_args = ["{MEMORY}", "{share:.2g}"], or the share that `gspo check` works out; or, '
                "where both do not fit, run.colocate = true, with which they time-share the memory"
            )


def _dealt(cores: Sequence[int], num: int) -> list[tuple[int, ...] | None]:
    """``cores`` in ``num`` runs of neighbours, as even as can be; where there are fewer, they are shared in turn."""
    if len(cores) < num:
        return [(cores[index % len(cores)],) for index in range(num)]
    ends = [len(cores) * index // num for index in range(num + 1)]
    return [tuple(cores[begin:end]) for begin, end in pairwise(ends)]


def _ranges(numbers: Sequence[int]) -> str:
    """Such as "0 to 3, 8"."""
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in _runs(sorted(numbers)))


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
