"""The `gspo` command: one entry for people; every process is started as its own module."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.runtime.errors import EXIT_CONFIGURATION, ConfigurationError
from services.runtime.lifecycle import module_command
from services.runtime.settings import add_configuration_arguments

PROCESSES: Final = {
    "broker": "start the broker: the durable queue between rollouts and learner",
    "rollout": "start one rollout: an SGLang server (or the one at rollout.server_url) and its agent loop",
    "learner": "start the learner: DeepSpeed, on learner.num_ranks ranks",
}

DESCRIPTION: Final = """\
GSPO for mixture-of-experts language models: SGLang rollouts stream trajectories over ZeroMQ to a DeepSpeed learner.

  gspo model tiny models/tiny          make a small model to try things with (about a minute)
  gspo check my.toml --explain         show every setting: value, where it came from, default and meaning
  gspo run examples/arithmetic.toml    run everything on this machine, with live progress
  gspo plot runs/arithmetic            draw a run's metrics
  gspo keys keys                       make the keys with which a run may leave this machine
  gspo doctor runs/arithmetic          say what a run is waiting for
  gspo stop runs/arithmetic            let it finish the batch under way, save, and end
  gspo record CONFIG --out DIR --groups 64    generate without a learner
  gspo replay runs/arithmetic          train its batches again, and compare the weights bit by bit
  gspo audit runs/arithmetic           prove that every trajectory was trained once, or dropped for a stated reason

On a cluster each process is started by itself: gspo broker CONFIG, gspo rollout CONFIG, gspo learner CONFIG.
"""

CHECK_DESCRIPTION: Final = """\
Check CONFIG, with the environment and --set as a process would read them, and print every setting as JSON.

  gspo check my.toml                              every value
  gspo check my.toml --explain                    every key: value, where it came from, default, type and meaning
  gspo check my.toml --explain batch.max_lag      one key
  gspo check my.toml --explain objective rollout  the keys of some sections
"""

RECORD_DESCRIPTION: Final = """\
Run the broker and the rollouts of CONFIG without a learner, until N groups are complete. The weights of model.path are
published as the only policy version. The directory is an ordinary run's, with groups and without batches: `gspo audit`
checks it, `gspo replay` trains on it, and the same command goes on with it after an interruption.

N is rounded up to whole batches. So that all groups may be of one version, the recording has batch.max_lag = batches - 1;
trained on by `gspo replay`, each batch is one version later than the one before. There is no evaluation.

`gspo rollout CONFIG --record DIR --groups N` is the same.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and act. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["rollout"] and any(word.partition("=")[0] == "--record" for word in words):
        words = ["record", *(word.replace("--record", "--out", 1) for word in words[1:])]
    if words and words[0] in PROCESSES:
        return _become(f"services.{words[0]}", words[1:])
    if words[:1] == ["replay"]:
        return _become("services.runs.replay", words[1:])
    if words[:2] == ["model", "tiny"]:
        return _become("services.models.command", words[2:])
    arguments = _parser().parse_args(words)
    try:
        return _act(arguments)
    except (ConfigurationError, ValueError) as error:
        print(f"gspo {arguments.command}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run broker, rollouts and learner on this machine, with live progress")
    add_configuration_arguments(run)
    run.add_argument("--plain", action="store_true", help="one line per event instead of a live table")
    record = commands.add_parser(
        "record",
        help="generate without a learner, into a directory that can be audited and trained on",
        description=RECORD_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_configuration_arguments(record)
    record.add_argument("--out", type=Path, required=True, metavar="DIR", help="the recording's directory")
    record.add_argument("--groups", type=int, required=True, metavar="N", help="groups to complete")
    record.add_argument("--plain", action="store_true", help="one line per event instead of a live table")
    for name, text in PROCESSES.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("replay", help="train a recorded run again and compare its weights bit by bit", add_help=False)
    model = commands.add_parser("model", help="make a model to start from")
    model.add_argument("kind", choices=["tiny"], help="tiny: byte-level tokenizer, small Qwen3-MoE, supervised cold start")
    check = commands.add_parser(
        "check",
        help="check a configuration file and print or explain its settings",
        description=CHECK_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_configuration_arguments(check)
    check.add_argument(
        "--explain",
        nargs="*",
        metavar="KEY",
        help="show value, source, default, type and meaning of these keys or sections; of all without KEY",
    )
    plot = commands.add_parser("plot", help="draw a run's metrics.jsonl and print its table")
    plot.add_argument("directory", type=Path, help="the run's directory")
    audit = commands.add_parser(
        "audit",
        help="prove from a run's ledger that every trajectory was trained exactly once or dropped for a stated reason",
        description="Reads the ledger of a run, living or ended, in one consistent snapshot, and names what is missing, "
        "doubled, damaged or out of order. Status 0: clean; 1: violations; 2: no run there.",
    )
    audit.add_argument("directory", type=Path, help="the run's directory")
    audit.add_argument("--json", action="store_true", help="the whole result as JSON")
    doctor = commands.add_parser(
        "doctor",
        help="say what a run is waiting for, and what to do about it",
        description="Asks the broker and every process's /readyz and /metrics, and reads files where nobody answers. "
        "Status 0: all is well; 1: something is wrong; 2: no such run.",
    )
    doctor.add_argument("run", type=Path, help="the run's directory, or its TOML file")
    doctor.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    stop = commands.add_parser("stop", help="let a run finish the batch under way, save, and end")
    stop.add_argument("directory", type=Path, help="the run's directory")
    stop.add_argument("--reason", default="gspo stop", help="what is recorded (default: %(default)s)")
    keys = commands.add_parser("keys", help="make the keys that let a run's processes know each other")
    keys.add_argument("directory", type=Path, help="where they are written; security.keys is set to it")
    keys.add_argument(
        "--name", action="append", default=[], help="one key of its own, such as rollout-7; can be given often"
    )
    keys.add_argument("--force", action="store_true", help="replace keys that are there")
    commands.add_parser("environments", help="list the environments and their options")
    return parser


def _act(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        from services.cli.run import run_command

        return run_command(arguments.config, arguments.overrides, plain=arguments.plain)
    if arguments.command == "record":
        from services.cli.run import record_command

        return record_command(arguments.config, arguments.overrides, arguments.out, arguments.groups, plain=arguments.plain)
    if arguments.command == "check":
        from services.cli.check import check_command

        return check_command(arguments.config, arguments.overrides, arguments.explain)
    if arguments.command == "doctor":
        from services.cli.doctor import doctor_command

        return doctor_command(arguments.run, arguments.overrides)
    if arguments.command == "stop":
        from services.cli.stop import stop_command

        return stop_command(arguments.directory, arguments.reason)
    if arguments.command == "keys":
        from services.cli.keys import keys_command

        return keys_command(arguments.directory, arguments.name, overwrite=arguments.force)
    if arguments.command == "plot":
        return _plot(arguments.directory)
    if arguments.command == "audit":
        from services.cli.audit import audit_command

        return audit_command(arguments.directory, as_json=arguments.json)
    return _environments()


def _plot(directory: Path) -> int:
    from rich.console import Console

    from services.cli.run import summary_table, write_plot

    path = write_plot(directory)
    Console().print(summary_table(directory))
    print(path)
    return 0


def _environments() -> int:
    import msgspec

    from services.environments import ENVIRONMENTS, find_environment

    for name in ENVIRONMENTS:
        environment = find_environment(name)
        print(f"{name}: {(environment.__doc__ or '').splitlines()[0]}")
        for option in msgspec.structs.fields(environment.options_type):
            default = "required" if option.required else f"default {option.default!r}"
            print(f"    {option.name} ({default})")
    print('"package.module:ClassName": an Environment class of your own')
    return 0


def _become(module: str, words: Sequence[str]) -> int:
    """Replace this process, so that signals go straight to the service."""
    os.execv(sys.executable, module_command(module, *words))


if __name__ == "__main__":
    sys.exit(main())
