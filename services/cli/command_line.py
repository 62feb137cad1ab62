"""The parser of the ``gspo`` command: its subcommands, their arguments, and their help texts."""

import argparse
from pathlib import Path
from typing import Final, TypeAlias

from gspo_services.cli.completion import SHELLS
from gspo_services.shared.runtime.config_arguments import add_configuration_arguments, add_override_argument

PROCESSES: Final = {
    "broker": "start the broker: the durable queue between rollouts and learner",
    "rollout": "start one rollout: an SGLang server (or the one at rollout.server_url) and its agent loop",
    "learner": "start the learner: DeepSpeed, on learner.num_ranks ranks",
    "serve": "serve clients of Tinker's API: they train adapters of the model, and sample from them",
    "sandbox": "serve sandboxes in which rollouts on other machines run the policy's programs",
}

DESCRIPTION: Final = """\
GSPO for mixture-of-experts language models: SGLang rollouts stream trajectories over ZeroMQ to a DeepSpeed learner.

Try it on one machine, without a GPU:

  gspo model tiny models/tiny          make a small model (about a minute)
  gspo run examples/arithmetic.toml    train it, with live progress
  gspo plot runs/arithmetic            draw the run's metrics

Start a run of your own and understand it:

  gspo init my-project                 ask a few questions; write a configuration and a file for your reward or agent
  gspo check my.toml                   check whether it can work: model, tasks, code, memory, speed, ports, disk
  gspo check my.toml --explain         show where each value came from, its default and its meaning
  gspo tasks verifiers ...             write the tasks of another project's environment to a file
  gspo env try my.toml --echo          play a few episodes here, without a run: messages, tokens, rewards

Watch and check a run:

  gspo view runs/arithmetic            look at it in the browser: curves, groups, tokens
  gspo doctor runs/arithmetic          show what it waits for, what is wrong, and what to do
  gspo stop runs/arithmetic            finish the current batch, save, and end
  gspo requeue runs/arithmetic         list quarantined batches, and why they are; requeue them
  gspo data add runs/sums more.jsonl   give it more training tasks, also while it goes on
  gspo audit runs/arithmetic           prove that each trajectory was trained once or dropped for a stated reason
  gspo compare runs/a runs/b           show the settings and the results that differ; --png FILE draws curves
  gspo replay runs/arithmetic          train its batches again and compare the weights bit by bit
  gspo eval my.toml --checkpoint all   score checkpoints or models: avg@k, pass@k, maj@k, Elo, with intervals
  gspo export runs/arithmetic          write a checkpoint as a Hugging Face model, with a card; --checkpoint best
  gspo backup runs/arithmetic DEST     copy it, also while it is running; gspo restore DEST RUN_DIR restores it

On several machines, make keys with `gspo keys DIR` and start each process on its own: gspo broker CONFIG,
gspo learner CONFIG, gspo rollout CONFIG --name rollout-0. `gspo COMMAND --help` explains each command.
"""

RUN_DESCRIPTION: Final = """\
Start the broker, the learner and rollout.num_servers rollouts of CONFIG on this machine, and restart those that crash. The
command ends when all batches are trained, with a table and a plot. Ctrl-C finishes the current batch and saves a checkpoint.
The same command continues from there.

The run's directory (run.directory) holds logs, the ledger, metrics.jsonl, checkpoints, and the trained model in export/.

  gspo run examples/arithmetic.toml --set run.num_batches=10 --set run.directory=runs/short
"""

GENERATE_DESCRIPTION: Final = """\
Run the broker and the rollouts of CONFIG without a learner, until N groups are complete. The weights of model.path are
published as the only policy version. The directory is a run's, with groups and without batches: `gspo audit` checks it and
`gspo replay` trains on it. After an interruption the same command continues.

N is rounded up to whole batches. All groups may be of one version because the run has batch.max_lag = batches - 1.
`gspo replay` trains each batch one version later than the one before. There is no evaluation.

`gspo rollout CONFIG --generate DIR --groups N` is the same.
"""

AUDIT_DESCRIPTION: Final = """\
Prove from a run's ledger that every trajectory was trained exactly once or dropped for a stated reason. The audit reads one
consistent snapshot, also while the run is active, and names what is missing, duplicated, damaged or out of order.

Status 0: clean; 1: violations; 2: no run there.
"""

BACKUP_DESCRIPTION: Final = """\
Copy a run to a new directory in DEST: one state of its ledger, the checkpoints and archive files that belong to it, settings
and metrics. The run may be active meanwhile. Files that an earlier backup in DEST holds are hard-linked: each backup is
complete, and only new files take room. To remove a backup, delete its directory. An interrupted backup is not listed, and
the next one removes it.

  gspo backup runs/arithmetic /backups/arithmetic       make one; every hour, from cron
  gspo backup --list /backups/arithmetic                list them, and the batches that each can be restored to
  gspo restore /backups/arithmetic runs/again           restore the newest

DEST should be on another disk than the run.
"""

RESTORE_DESCRIPTION: Final = """\
Restore a backup into the new directory RUN_DIR and check every file against its digest. BACKUP is one backup, or the
directory that `gspo backup` writes to, for its newest. To continue the run, use the command that started it:

  gspo restore /backups/arithmetic runs/arithmetic
  gspo run examples/arithmetic.toml                              continue it, if RUN_DIR is its run.directory
  gspo run examples/arithmetic.toml --set run.directory=runs/again

With --batch N the run stands as it did when a checkpoint covered N batches. Later batches are gone, and the prompts of
unfinished groups are sampled again; no prompt is skipped or used twice.

  gspo restore /backups/arithmetic runs/again --batch 40

Where the learner has a volume of its own, --learner DIR names its run directory there, which must not exist yet either.

A restored run has a new identity: processes of the old run that are still alive end instead of joining it.

Status 0: restored, and its audit is clean; 1: a file does not match its digest, or the audit fails; 2: cannot.
"""

ACCEPT_LOSS_DESCRIPTION: Final = """\
Go on from what is left of a run whose broker refuses to start because something acknowledged is missing. The loss is
recorded in the ledger, and `gspo audit` names it for ever. What is there now is copied to damage-N in the run directory, and
checkpoints of batches whose training the ledger does not know are moved there. Putting back a backup is better: then
nothing, or less, is lost.

Status 0: a broker can start again; 1: a broker is running; 2: no run there; 3: there is no ledger to go on from.
"""

DOCTOR_DESCRIPTION: Final = """\
Ask the broker for its status and every process for /readyz and /metrics, read the logs and the ledger, and show what the run
waits for, what is wrong, and what to do.

Status 0: nothing is wrong; 1: something is wrong; 2: no such run.
"""

VIEW_DESCRIPTION: Final = """\
Show runs in the browser, live or afterwards: reward, lag, clipping and events over time; the groups of a batch; each token
of a trajectory with its log-probs, policy version, ratio and advantage; what the policy wrote for a task over the versions.

  gspo view runs/arithmetic               one run
  gspo view runs/*                        several, side by side
  gspo view runs/arithmetic --host 0.0.0.0  for other hosts: the address printed then holds a token

The command only reads: it writes nothing into a run and loads nothing from other hosts. Ctrl-C ends it.
"""

STOP_DESCRIPTION: Final = """\
Ask the broker to stop the run. The learner finishes the current batch, saves a checkpoint and exports the model; then the
processes end.
"""

REQUEUE_DESCRIPTION: Final = """\
List the quarantined batches, or requeue them.

A batch is quarantined when two learners report that they cannot train it, when three learners in a row die while training
it, or when it cannot be read. The run goes on without it. Find the cause first: the list shows the learners' errors.
Requeued groups that are fresh enough (batch.max_lag) are trained as they are; the prompts of the others are sampled again.
The command works while the broker runs and when no process does.

  gspo requeue runs/arithmetic             what was quarantined, when and why
  gspo requeue runs/arithmetic 7 12        requeue batches 7 and 12
  gspo requeue runs/arithmetic all         requeue all of them

Status 0: done; 1: the broker refuses, or the ledger cannot be used; 2: no such run, or the batch is not quarantined.
"""

KEYS_DESCRIPTION: Final = """\
Make the key pairs that a run's processes use to recognise each other and to encrypt their messages: NAME.secret and
NAME.public for each role (broker, learner, rollout, operator). A run on several machines needs them. Set security.keys to
the directory.

  gspo keys keys                       one pair for each role
  gspo keys keys --name rollout-7      one for a single rollout, which then cannot speak for others
"""


SETUP_DESCRIPTION: Final = """\
Install what a run needs beside this package into the environment of this command: SGLang, DeepSpeed, PyTorch and the rest,
each file in the version and with the hash that was tested. Other versions that are there are replaced, so use an environment
of its own.

  python3.11 -m venv env && env/bin/pip install gspo-VERSION-py3-none-any.whl
  env/bin/gspo setup                   for CPUs; about 3 minutes
  env/bin/gspo setup --gpu             for GPUs with CUDA 13; about 10 GB

`make setup` and `make setup-gpu` do the same in a checkout.

Status 0: installed; 1: a command failed, such as pip; 2: there is no pip, or there are no lists.
"""

COMPLETION_DESCRIPTION: Final = """\
Print a script that completes commands and options. To use it in every shell, add one line to the shell's start-up file:

  eval "$(gspo completion bash)"          ~/.bashrc
  eval "$(gspo completion zsh)"           ~/.zshrc, after compinit
  gspo completion fish | source           ~/.config/fish/config.fish
"""


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="print the release and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_run_commands(commands)
    _add_directory_commands(commands)
    keys = _add(commands, "keys", "make the keys that the processes of a run on several machines need", KEYS_DESCRIPTION)
    keys.add_argument("directory", type=Path, help="where to write them")
    keys.add_argument(
        "--name", action="append", default=[], help="make this key instead, such as rollout-7; can be repeated"
    )
    keys.add_argument("--force", action="store_true", help="replace existing keys")
    setup = _add(commands, "setup", "install all that a run needs beside this package, as tested", SETUP_DESCRIPTION)
    setup.add_argument("--gpu", action="store_true", help="for GPUs with CUDA 13, instead of CPUs")
    _add(commands, "environments", "list the environments and their options")
    completion = _add(
        commands, "completion", "print a script that completes gspo's commands in a shell", COMPLETION_DESCRIPTION
    )
    completion.add_argument("shell", choices=SHELLS)
    commands.add_parser("data", help="add training tasks to a run, also while it is running", add_help=False)
    commands.add_parser("tasks", help="write the tasks of another project's environment to a file", add_help=False)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add(commands: Commands, name: str, text: str, description: str = "") -> argparse.ArgumentParser:
    """Add a command. ``text``: its line in the list of commands, and its description unless ``description`` is given."""
    return commands.add_parser(
        name,
        help=text,
        description=description or f"{text[0].upper()}{text[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_run_commands(commands: Commands) -> None:
    """Commands that take a configuration file, and the processes, which parse their own arguments."""
    model = _add(commands, "model", "make a model to start from")
    model.add_argument(
        "kind",
        choices=["tiny", "dequantise"],
        help="tiny: byte-level tokenizer, small Qwen3-MoE, supervised cold start; dequantise: a quantised model in bfloat16",
    )
    tried = _add(commands, "env", "try an environment or an agent without a run: gspo env try --help")
    tried.add_argument("action", choices=["try"], help="try: play a few episodes here, and show what would be trained on")
    commands.add_parser("check", help="check whether a configuration can work, and what it will need", add_help=False)
    commands.add_parser("init", help="start a project: a configuration, and a file for your reward or agent", add_help=False)
    run = _add(commands, "run", "run broker, rollouts and learner on this machine, with live progress", RUN_DESCRIPTION)
    generate = _add(
        commands, "generate", "generate groups without a learner, for gspo audit and gspo replay", GENERATE_DESCRIPTION
    )
    for command in (run, generate):
        add_configuration_arguments(command)
        command.add_argument("--plain", action="store_true", help="print one line per event instead of a live table")
        command.add_argument("--quiet", action="store_true", help="print only what somebody may have to look at")
    generate.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory of the generated groups")
    generate.add_argument("--groups", type=int, required=True, metavar="N", help="groups to complete")
    for name, text in PROCESSES.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("sglang-cpu", help="start SGLang without a GPU, by SGLang's own options", add_help=False)


def _add_directory_commands(commands: Commands) -> None:
    """Commands that take a run's directory."""
    doctor = _add(commands, "doctor", "show what a run waits for, what is wrong, and what to do", DOCTOR_DESCRIPTION)
    doctor.add_argument("run", type=Path, help="the run's directory, or its TOML file")
    add_override_argument(doctor, "override one setting of the run, such as --set security.keys=DIR; can be repeated")
    view = _add(commands, "view", "look at runs in the browser: curves, groups, each token's numbers", VIEW_DESCRIPTION)
    view.add_argument(
        "directories", type=Path, nargs="+", metavar="RUN_DIR", help="the directory of a run; several are shown together"
    )
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    view.add_argument("--port", type=int, help="port to listen on; 0: any free port (default: 7420, or a free port)")
    view.add_argument(
        "--cache", type=Path, metavar="DIR", help="where to store the results of replays (default: ~/.cache/gspo/view)"
    )
    stop = _add(commands, "stop", "finish a run's current batch, save, and end it", STOP_DESCRIPTION)
    stop.add_argument("--reason", default="gspo stop", help="why; recorded with the run (default: %(default)s)")
    add_override_argument(stop, "override one setting of the run, such as broker.batch_endpoint=ADDRESS; can be repeated")
    plot = _add(commands, "plot", "draw a run's metrics into plot.png and print its table")
    audit = _add(commands, "audit", "prove that each trajectory was trained once or dropped", AUDIT_DESCRIPTION)
    audit.add_argument("--json", action="store_true", help="print the whole result as JSON")
    backup = _add(commands, "backup", "copy a run, also while it is running", BACKUP_DESCRIPTION)
    backup.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run's directory; with --list, DEST")
    backup.add_argument("destination", type=Path, metavar="DEST", nargs="?", help="the directory for its backups")
    backup.add_argument("--list", action="store_true", help="list the backups in DEST")
    restore = _add(commands, "restore", "restore a backup of a run into a new directory", RESTORE_DESCRIPTION)
    restore.add_argument("backup", type=Path, metavar="BACKUP", help="a backup, or the directory of several")
    restore.add_argument("directory", type=Path, metavar="RUN_DIR", help="a directory that does not exist yet")
    restore.add_argument("--batch", type=int, metavar="N", help="as the run stood when a checkpoint covered N batches")
    restore.add_argument("--learner", type=Path, metavar="DIR", help="put the learner's files there; RUN_DIR links to them")
    accept = _add(commands, "accept-loss", "go on from what is left of a damaged run", ACCEPT_LOSS_DESCRIPTION)
    requeue = _add(commands, "requeue", "list quarantined batches, or requeue them", REQUEUE_DESCRIPTION)
    for command in (stop, plot, audit, accept, requeue):
        command.add_argument("directory", type=Path, help="the run's directory")
    requeue.add_argument("batches", nargs="*", metavar="BATCH", help="batches to requeue, or all; none: list them")
    requeue.add_argument("--list", action="store_true", help="only list, whatever batches are named")
    commands.add_parser("track", help="send a run to TensorBoard, Weights & Biases, MLflow or Trackio", add_help=False)
    commands.add_parser("replay", help="train a recorded run again and compare its weights bit by bit", add_help=False)
    commands.add_parser("compare", help="compare runs: settings, measures, curves", add_help=False)
    commands.add_parser("eval", help="score models and checkpoints on evaluation sets, with real SGLang", add_help=False)
    commands.add_parser("export", help="write a run's checkpoint as a Hugging Face model, with a card", add_help=False)
