"""The ``gspo`` command: one entry point for people. Each process is started as its own module."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gspo_services.cli.command_line import PROCESSES, command_line
from gspo_services.cli.completion import completion_script
from gspo_services.cli.tool import lacking
from gspo_services.shared.runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigurationError,
    OccupiedError,
)
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.plain_text import indented_lines
from gspo_services.shared.runtime.private_files import keep_private

if TYPE_CHECKING:
    from gspo_services.cli.run import Look

OWN_PROCESSES: Final = {
    ("check",): "gspo_services.prepare.check.command",
    ("env", "try"): "gspo_services.prepare.env_try.command",
    ("eval",): "gspo_services.runs.eval.command",
    ("export",): "gspo_services.runs.export",
    ("init",): "gspo_services.prepare.init.command",
    ("model", "dequantise"): "gspo_services.prepare.dequantise",
    ("model", "tiny"): "gspo_services.prepare.tiny_models.command",
    ("replay",): "gspo_services.runs.replay",
    ("sandbox",): "gspo_services.tasks.sandbox.server",
    ("serve",): "gspo_services.serve",
    ("sglang-cpu",): "gspo_services.shared.sglang_cpu.launch",
    ("track",): "gspo_services.runs.track.command",
}
"""Commands that parse their own arguments, and load what the others do not need."""
FOR_OTHERS: Final = ("export", "init", "model", "setup", "tasks", "completion")
"""Commands whose files are for others, too: these follow the umask."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and act. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in FOR_OTHERS:
        keep_private()
    if words[:1] not in (["run"], ["generate"]):
        begin_command()  # Those two go on whoever reads them: their result is the run.
    if words[:1] == ["rollout"] and any(word.partition("=")[0] == "--generate" for word in words):
        words = ["generate", *(word.replace("--generate", "--out", 1) for word in words[1:])]
    try:
        return _dispatch(words)
    except ModuleNotFoundError as error:
        if not (text := lacking(error)):
            raise
        print(indented_lines(f"gspo {words[0]}: {text}"), file=sys.stderr)
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        print(f"gspo {words[0]}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ConfigurationError, OccupiedError, ValueError, OSError) as error:
        print(indented_lines(f"gspo {words[0]}: {error}"), file=sys.stderr)
        return EXIT_FAILED if isinstance(error, OccupiedError) else EXIT_CONFIGURATION


def _dispatch(words: list[str]) -> int:
    for named, module in OWN_PROCESSES.items():
        if words[: len(named)] == list(named):
            return _become("gspo_services.cli.tool", [module, *words[len(named) :]])
    if words and words[0] in PROCESSES:
        return _become(f"gspo_services.{words[0]}", words[1:])
    if words[:1] == ["--version"]:
        return _version()
    if words[:1] == ["tasks"]:
        from gspo_services.cli.tasks import tasks_command

        return tasks_command(words[1:])
    if words[:1] == ["data"]:
        from gspo_services.cli.data import data_command

        return data_command(words[1:])
    if words[:1] == ["compare"]:
        from gspo_services.cli.compare import compare_command

        return compare_command(words[1:])
    return _act(command_line().parse_args(words))


def _act(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        from gspo_services.cli.run import run_command

        return run_command(arguments.config, arguments.overrides, look=_look(arguments))
    if arguments.command == "generate":
        from gspo_services.cli.run import generate_command

        look = _look(arguments)
        return generate_command(arguments.config, arguments.overrides, arguments.out, arguments.groups, look=look)
    if arguments.command == "doctor":
        from gspo_services.cli.doctor import doctor_command

        return doctor_command(arguments.run, arguments.overrides)
    if arguments.command == "stop":
        from gspo_services.cli.stop import stop_command

        return stop_command(arguments.directory, arguments.reason, arguments.overrides)
    if arguments.command == "requeue":
        from gspo_services.cli.requeue import requeue_command

        return requeue_command(arguments.directory, arguments.batches, only_list=arguments.list)
    if arguments.command == "view":
        from gspo_services.cli.view import view_command

        return view_command(arguments.directories, host=arguments.host, port=arguments.port, cache=arguments.cache)
    if arguments.command == "keys":
        from gspo_services.cli.keys import keys_command

        return keys_command(arguments.directory, arguments.name, overwrite=arguments.force)
    if arguments.command == "setup":
        from gspo_services.cli.setup import setup_command

        return setup_command("gpu" if arguments.gpu else "cpu")
    if arguments.command == "plot":
        return _plot(arguments.directory)
    if arguments.command in ("backup", "restore"):
        return _act_on_backups(arguments)
    if arguments.command == "audit":
        from gspo_services.cli.audit import audit_command

        return audit_command(arguments.directory, as_json=arguments.json)
    if arguments.command == "accept-loss":
        from gspo_services.cli.accept_loss import accept_loss_command

        return accept_loss_command(arguments.directory)
    if arguments.command == "completion":
        sys.stdout.write(completion_script(command_line(), arguments.shell))
        return 0
    return _environments()


def _look(arguments: argparse.Namespace) -> "Look":
    return "quiet" if arguments.quiet else "plain" if arguments.plain else "live"


def _act_on_backups(arguments: argparse.Namespace) -> int:
    from gspo_services.cli.backup import backup_command, list_command, restore_command

    if arguments.command == "restore":
        return restore_command(arguments.backup, arguments.directory, arguments.batch, arguments.learner)
    if arguments.list:
        return list_command(arguments.destination or arguments.directory)
    return backup_command(arguments.directory, arguments.destination)


def _plot(directory: Path) -> int:
    from gspo_services.cli.run import summary_table, write_plot
    from gspo_services.runs.metrics import read_metrics
    from gspo_services.shared.runtime.console import PlainConsole

    metrics = read_metrics(directory)
    path = write_plot(metrics)
    console = PlainConsole()
    console.print(summary_table(metrics))
    for damage in metrics.damage:
        console.print(f"note: {damage}", soft_wrap=True)
    console.print(str(path), soft_wrap=True)
    return 0


def _environments() -> int:
    import msgspec

    from gspo_services.tasks.environments import ENVIRONMENTS, TASK_SETS, find_task_set

    for name in (*ENVIRONMENTS, *TASK_SETS):
        found = find_task_set(name)
        print(f"{name}{' (for agents)' * (name in TASK_SETS)}: {(found.__doc__ or '').splitlines()[0]}")
        for option in msgspec.structs.fields(found.options_type):
            default = "required" if option.required else f"default {option.default!r}"
            print(f"    {option.name} ({default})")
    print('"package.module:ClassName": your own Environment class, or for agents your own TaskSet')
    return 0


def _version() -> int:
    from importlib.metadata import version

    print(f"gspo {version('gspo')}")
    return 0


def _become(module: str, words: Sequence[str]) -> int:
    """Replace this process, so that signals go straight to the service."""
    from gspo_services.shared.runtime.lifecycle import module_command

    os.execv(sys.executable, module_command(module, *words))


if __name__ == "__main__":
    sys.exit(main())
