"""``gspo check CONFIG``: says in seconds whether a configuration can work, and what it will need."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

from gspo_services.prepare.check.code import CodeReport, CodeWorker
from gspo_services.prepare.check.explain import check_command
from gspo_services.prepare.check.findings import Finding, worst
from gspo_services.prepare.check.gpus import hardware_here, named_hardware
from gspo_services.prepare.check.machine import machine_findings
from gspo_services.prepare.check.memory import memory_findings
from gspo_services.prepare.check.model import model_findings, read_model
from gspo_services.prepare.check.objective import objective_findings
from gspo_services.prepare.check.report import as_json, show
from gspo_services.prepare.check.reward_model import reward_model_findings
from gspo_services.prepare.check.sampling import sampling_findings
from gspo_services.prepare.check.situation import ReadModel, Situation, is_for_several_hosts
from gspo_services.prepare.check.speed import speed_findings
from gspo_services.prepare.check.tasks import code_findings, prompt_tokens
from gspo_services.prepare.check.teacher import read_teacher
from gspo_services.prepare.check.unused import schedule_findings, slow_findings, untried_findings, unused_findings
from gspo_services.shared.placement import is_for_cuda
from gspo_services.shared.runtime.config_arguments import add_configuration_arguments
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    ServiceError,
)
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.plain_text import indented_lines
from gspo_services.shared.settings import Configuration, Settings, load_configuration

CODE_S: Final = 60.0
DESCRIPTION: Final = """\
Check a configuration before a run: settings, model, tokenizer, tasks, your code, memory, speed, ports, disk, keys. Nothing
of a run is touched, and no model is loaded. One line for each check that has something to say, for all with --verbose:

  ok    as it should be
  note  worth knowing
  warn  it can run, but not well; with the way out
  fail  it cannot work; with the way out

and how it is known: read (in files and settings), tried (done here), estimated (a formula; docs/guide/models-and-gpus.md
says which, and how wide it is).

  gspo check my.toml
  gspo check my.toml --gpu H100 --gpus 8                 estimate for these GPUs instead of this machine
  gspo check run.toml --model DIR --elsewhere            for other machines; of the model, config.json is enough

A run whose broker is reached over a network is taken to be elsewhere. Its files may be missing here.

  gspo check my.toml --probe                             start the server, and compare it with the learner's model

  gspo check my.toml --settings                          every setting as JSON
  gspo check my.toml --explain                           every key: value, where it came from, default, type and meaning
  gspo check my.toml --explain batch.max_lag             one key
  gspo check my.toml --explain objective rollout         the keys of some sections

  gspo check --kubernetes DIR                            rendered manifests, on a model of a cluster; --help says more

Status 0: it can work; 1: it cannot; 2: the configuration cannot be read.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and check. Returns the exit status."""
    begin_command()
    words = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == "--kubernetes" for word in words):
        return _check_kubernetes(words)
    arguments = _parser().parse_args(argv)
    try:
        if arguments.explain is not None or arguments.settings:
            return check_command(arguments.config, arguments.overrides, arguments.explain)
        if arguments.probe:
            return _probe(arguments)
        return _check(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ConfigurationError, ServiceError, OSError) as error:
        if arguments.json:
            broken = Finding(check="settings", status="fail", text=str(error), way_out="correct the configuration")
            sys.stdout.write(as_json([broken], str(arguments.config), "") + "\n")
        else:
            sys.stderr.write(indented_lines(f"gspo check: {error}") + "\n")
        return EXIT_CONFIGURATION


def _probe(arguments: argparse.Namespace) -> int:
    settings = load_configuration(arguments.config, arguments.overrides).settings
    # By its name: it loads torch, which no other check needs.
    return int(import_module("gspo_services.prepare.probe").check_probe(settings))


def _check_kubernetes(words: Sequence[str]) -> int:
    from gspo_services.prepare.cluster_check import check_cluster

    try:
        return check_cluster(words)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(indented_lines(f"gspo check: {error}") + "\n")
        return EXIT_CONFIGURATION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo check", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration_arguments(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="look at this model's directory instead of model.path")
    parser.add_argument("--gpu", metavar="NAME", help="estimate for this GPU: A100, H100, H200, B200, L40S, 4090")
    parser.add_argument("--gpus", type=_positive, metavar="N", help="how many of them the run has, on all machines")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--elsewhere", action="store_true", help="the run will be on other machines: files may be missing here"
    )
    place.add_argument("--here", action="store_true", help="the run will be on this machine, whatever its endpoints are")
    parser.add_argument(
        "--probe", action="store_true", help="start the server (or ask rollout.server_url), load the model, and compare them"
    )
    parser.add_argument("--no-code", action="store_true", help="do not open the tokenizer, the tasks and your code")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=CODE_S,
        metavar="S",
        help="seconds that a step of your code may take (default: %(default)g)",
    )
    parser.add_argument("--verbose", action="store_true", help="show each check, also where all is well")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--settings", action="store_true", help="print every setting as JSON instead of checking")
    shown.add_argument(
        "--explain",
        nargs="*",
        metavar="KEY",
        help="show value, source, default, type and meaning of these keys or sections; of all without KEY",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text[:50]!r}: expected a number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text[:50]!r}: expected seconds above 0")
    return value


def _check(arguments: argparse.Namespace) -> int:
    configuration = load_configuration(arguments.config, arguments.overrides, fetch=not arguments.elsewhere)
    situation = _situation(arguments, configuration)
    findings = _findings(situation, None if arguments.no_code else arguments.timeout)
    where = "other machines" if situation.has_unknown_hardware else situation.hardware.text
    if arguments.json:
        sys.stdout.write(as_json(findings, str(arguments.config), where) + "\n")
    else:
        show(findings, f"{arguments.config} on {where}", PlainConsole(), verbose=arguments.verbose)
    return EXIT_FAILED if worst(findings) == "fail" else 0


def _findings(situation: Situation, code_s: float | None) -> list[Finding]:
    if code_s is None:
        return all_findings(situation, None)
    worker = CodeWorker(situation)
    try:
        return all_findings(situation, lambda: worker.finish(code_s))
    finally:
        worker.close()


def _situation(arguments: argparse.Namespace, configuration: Configuration) -> Situation:
    """Raises: ConfigurationError for hardware that is not known."""
    settings = configuration.settings
    if arguments.gpus is not None and arguments.gpu is None:
        raise ConfigurationError("--gpus says how many, and --gpu is missing: name it, such as --gpu H100")
    several = is_for_several_hosts(settings)
    elsewhere = arguments.elsewhere or (several and not arguments.here)
    ranks = settings.learner.num_ranks * settings.learner.num_nodes
    if arguments.gpu is None:
        hardware = hardware_here(for_cuda=is_for_cuda(settings))
    else:
        hardware = named_hardware(arguments.gpu, arguments.gpus or 1)
    return Situation(
        settings=settings,
        sources=configuration.sources,
        model_path=arguments.model or settings.model.path,
        hardware=hardware,
        elsewhere=elsewhere,
        num_rollouts=_num_rollouts(settings, hardware.num_devices - ranks if hardware.is_named and several else 0),
    )


def _num_rollouts(settings: Settings, spare_devices: int) -> int:
    """On several hosts the GPUs that the learner leaves have rollouts, one for each server's set of them; `gspo run` starts
    rollout.num_servers.
    """
    return max(1, spare_devices // settings.rollout.ranks_per_server) if spare_devices else settings.rollout.num_servers


def all_findings(situation: Situation, report: Callable[[], CodeReport] | None) -> list[Finding]:
    """Everything that is found, in the table's order. ``report``: waits for what the worker says; None: there is none."""
    model, findings = read_model(situation)
    findings += model_findings(situation, model)
    teacher, of_teacher = read_teacher(situation)
    model = replace(model, teacher=teacher)
    findings += of_teacher
    findings += objective_findings(situation, model)
    findings += reward_model_findings(situation)
    said = None if report is None else report()
    mean = None
    if said is not None:
        findings += code_findings(situation, said)
        mean = prompt_tokens(said)
    findings += sampling_findings(situation, said)
    findings += untried_findings(situation)
    return [*findings, *_of_the_machine(situation, model, mean)]


def _of_the_machine(situation: Situation, model: ReadModel, mean_prompt: float | None) -> list[Finding]:
    sampling = situation.settings.sampling
    # Where prompts could not be measured: what the limits leave for them, halved.
    prompt = (sampling.max_tokens - sampling.max_turn_tokens) / 2 if mean_prompt is None else mean_prompt
    return [
        *machine_findings(situation, model),
        *memory_findings(situation, model, prompt),
        *speed_findings(situation, model, prompt),
        *schedule_findings(situation),
        *unused_findings(situation),
        *slow_findings(situation, model, prompt),
    ]


if __name__ == "__main__":
    sys.exit(main())
