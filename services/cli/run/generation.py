"""``gspo generate CONFIG``: generate without a learner, into a ledger for ``gspo audit`` and ``gspo replay``."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gspo_services.cli.run.command import run_processes, with_free_ports
from gspo_services.cli.run.display import Look
from gspo_services.cli.run.processes import GRACE_S, process_specs
from gspo_services.cli.run.supervisor import ProcessSpec
from gspo_services.prepare.ports import PortClaims
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.lifecycle import run_process
from gspo_services.shared.runtime.logs import configure_logging
from gspo_services.shared.settings import Settings, forwarded_arguments, load_settings, require_model


def generate_command(config: Path, overrides: Sequence[str], out: Path, num_groups: int, *, look: Look) -> int:
    """Generate. Returns the exit status."""
    configure_logging("generate")
    settings, own = generation_settings(config, overrides, out, num_groups)
    claims = PortClaims()
    settings, own = with_free_ports(config, [*overrides, *own], look, claims)
    require_model(settings.model.path)
    wanted = settings.run.num_batches * settings.batch.groups_per_batch
    specs = generation_specs(settings, forwarded_arguments(config, own))
    console = PlainConsole()
    done = partial(_is_complete, wanted=wanted)
    status = run_process(lambda stop: run_processes(settings, specs, console, stop, look=look, done=done))
    claims.close()
    if status == 0 and look != "quiet":
        console.print(f"generated in {out}: `gspo audit {out}` checks it, `gspo replay {out}` trains on it", soft_wrap=True)
    return status


def generation_settings(config: Path, overrides: Sequence[str], out: Path, num_groups: int) -> tuple[Settings, list[str]]:
    """The settings of the generating run, and the overrides of ``config`` that give them. Raises: ConfigurationError."""
    if num_groups < 1:
        raise ConfigurationError(f"--groups is {num_groups}: use at least 1")
    size = load_settings(config, overrides, fetch=True).batch.groups_per_batch
    num_batches = -(-num_groups // size)
    own = [
        f"run.directory={out}",
        f"run.num_batches={num_batches}",
        f"batch.max_lag={num_batches - 1}",
        "evaluation.every_batches=0",
        # Nobody trains an adapter: what is published is the model.
        "lora.publish=merged",
        "lora.adapters=[]",
        'lora.adapter_field=""',
    ]
    return load_settings(config, [*overrides, *own]), own


def generation_specs(settings: Settings, forwarded: Sequence[str]) -> list[ProcessSpec]:
    """The processes of a run, with the publisher of the starting weights in the learner's place."""
    return [_publisher(spec) if spec.name == "learner" else spec for spec in process_specs(settings, forwarded)]


def _publisher(learner: ProcessSpec) -> ProcessSpec:
    return dataclasses.replace(learner, name="weights", module="gspo_services.learner.starting_weights", grace_s=GRACE_S)


def _is_complete(status: dict[str, Any], *, wanted: int) -> bool:
    return bool(status["groups"]["complete"] >= wanted or status["finished"])
