"""``gspo init DIR``: begins a project."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from gspo_services.prepare.init.choices import (
    HUB_MODELS,
    KINDS,
    PLACES,
    TINY_MODELS,
    WITHOUT_FILES,
    Answers,
    Kind,
    Place,
)
from gspo_services.prepare.init.project import Project, make_project, write_project
from gspo_services.prepare.init.questions import Ask, Tell, choose, fill, number, taken
from gspo_services.prepare.init.rows import columns_of, own_rows
from gspo_services.shared.estimates import device_named, known_devices
from gspo_services.shared.runtime.errors import EXIT_CONFIGURATION, EXIT_INTERRUPTED, ConfigurationError
from gspo_services.shared.runtime.output import begin_command
from gspo_services.shared.runtime.paths import expanded, is_hub_name
from gspo_services.shared.runtime.plain_text import indented_lines, one_line
from gspo_services.shared.settings import SCHEME, hub_name

DEFAULT_GPUS: Final[Mapping[str, int]] = {"laptop": 0, "gpu": 1, "node": 8, "kubernetes": 8}
SAMPLE_ROWS: Final = "sample rows"
DESCRIPTION: Final = """\
Begin a project in DIR: a configuration whose values fit each other, a small file for your reward, agent or environment, and
sample rows where you have none. It asks what the command line leaves open; without a terminal, or with --defaults, it takes
the defaults. Nothing is written over.

  gspo init my-project
  gspo init my-project --kind reward --data rows.jsonl                   your rows; one in ten is held out
  gspo init my-project --kind agent --hardware gpu --model models/Qwen3-0.6B
  gspo init my-project --kind code --lora 16                             programs, and adapters of rank 16
  gspo init my-project --kind maths --hardware node --gpus 8 --gpu H100 --model /models/Qwen3-8B

Then: gspo check run.toml, and gspo run run.toml, in DIR.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, ask, write. Returns the exit status."""
    begin_command()
    arguments = _parser().parse_args(argv)
    try:
        asks = not arguments.defaults and sys.stdin.isatty() and sys.stdout.isatty()
        answers = answers_of(arguments, input if asks else None, _say)
        project = make_project(answers, Path.cwd())
        write_project(project)
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("\ngspo init: interrupted; nothing was written\n")
        return EXIT_INTERRUPTED
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(indented_lines(f"gspo init: {error}") + "\n")
        return EXIT_CONFIGURATION
    _say(report(project))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo init", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to begin; it may exist")
    parser.add_argument("--kind", choices=list(KINDS), help="what is trained (default: reward)")
    parser.add_argument("--hardware", choices=list(PLACES), help="where it runs (default: laptop)")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face model's directory, or its name on the hub")
    parser.add_argument("--gpus", type=_positive, metavar="N", help="GPUs of the node or the cluster (default: 8)")
    parser.add_argument("--gpu", metavar="NAME", help=f"which GPU: {', '.join(known_devices())} (default: H100)")
    parser.add_argument(
        "--data",
        type=_given,
        metavar="FILE",
        help="your rows, a file or a folder; default: sample rows are written",
    )
    parser.add_argument("--eval-data", type=_given, metavar="FILE", help="held-out rows (default: one in ten of --data)")
    parser.add_argument("--prompt-column", default="", metavar="NAME", help="the column with the prompt (default: found)")
    parser.add_argument("--answer-column", default="", metavar="NAME", help="the column with the answer (default: found)")
    parser.add_argument(
        "--manifests", type=_given, metavar="DIR", help="deploy/k8s of this project (default: found above DIR or here)"
    )
    parser.add_argument("--lora", type=_positive, metavar="RANK", help="train adapters; 8 to 64 is usual")
    parser.add_argument(
        "--teacher", default="", metavar="DIR", help="a larger model, or an SGLang server's URL, that scores each token too"
    )
    parser.add_argument("--answer-tokens", type=_positive, metavar="N", help="the most tokens of an answer")
    parser.add_argument("--defaults", action="store_true", help="ask nothing")
    return parser


def _given(text: str) -> Path:
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"{text[:50]!r}: expected a number from 1 up")
    return int(text)


def answers_of(arguments: argparse.Namespace, ask: Ask | None, tell: Tell) -> Answers:
    """What the command line says, and what is typed for the rest. ``ask`` None: the defaults.

    Raises: ConfigurationError for what does not go together; EOFError.
    """
    kind = cast(Kind, arguments.kind or (choose(ask, tell, "What do you train?", KINDS, "reward") if ask else "reward"))
    place = cast(
        Place, arguments.hardware or (choose(ask, tell, "Where does it run?", PLACES, "laptop") if ask else "laptop")
    )
    num_gpus = DEFAULT_GPUS[place] if arguments.gpus is None else arguments.gpus
    if ask and place in ("node", "kubernetes") and arguments.gpus is None:
        num_gpus = number(ask, tell, "How many GPUs?", num_gpus)
    if place in ("node", "kubernetes") and num_gpus < 2:
        raise ConfigurationError(f"--gpus is {num_gpus}: --hardware {place} needs 2 at least; --hardware gpu shares one")
    gpu = ""
    if place != "laptop":
        gpu = taken(ask, tell, "Which GPU?", "H100", _gpu) if ask and not arguments.gpu else _gpu(arguments.gpu or "H100")
    usual = f"{SCHEME}{HUB_MODELS[place]}" if place in HUB_MODELS else TINY_MODELS[kind == "code"]
    model = arguments.model or (fill(ask, "Which model, a directory or its name on the hub?", usual) if ask else usual)
    if arguments.data is None and arguments.eval_data is not None:
        raise ConfigurationError("--eval-data is given and --data is not: name the rows for training, too")
    if kind in WITHOUT_FILES and arguments.data is not None:
        raise ConfigurationError(
            f"--data is given, and --kind {kind} has tasks of its own: use --kind reward, agent, maths or code"
        )
    data = arguments.data
    if ask and data is None and kind not in WITHOUT_FILES:

        def rows(typed: str) -> Path | None:
            if typed == SAMPLE_ROWS:
                return None
            columns = columns_of(kind, arguments.prompt_column, arguments.answer_column)
            own_rows(path := _path(typed), None, columns)
            return path

        data = taken(ask, tell, "Your rows, a file or a folder?", SAMPLE_ROWS, rows)
    model, on_hub = _found(arguments.directory, model, place)
    return Answers(
        directory=arguments.directory,
        kind=kind,
        place=place,
        model=model,
        hub_name=on_hub,
        num_gpus=1 if place == "gpu" else num_gpus if place != "laptop" else 0,
        gpu_name=gpu,
        data=data,
        eval_data=arguments.eval_data,
        prompt_column=arguments.prompt_column,
        answer_column=arguments.answer_column,
        answer_tokens=arguments.answer_tokens,
        manifests=_manifests(arguments.directory, arguments.manifests) if place == "kubernetes" else "",
        lora_rank=arguments.lora or 0,
        teacher=_found(arguments.directory, arguments.teacher, place)[0] if arguments.teacher else "",
    )


def _manifests(directory: Path, given: Path | None) -> str:
    """The way from ``directory`` to deploy/k8s. Raises: ConfigurationError when that is not found."""
    own = directory.resolve()
    above = (parent / "deploy" / "k8s" for start in (own, Path.cwd()) for parent in (start, *start.parents))
    for place in above if given is None else (given.resolve(),):
        if (place / "base" / "kustomization.yaml").is_file():
            return os.path.relpath(place, own)
    where = f"{given} has no base/kustomization.yaml" if given else f"there is no deploy/k8s above {own} or here"
    raise ConfigurationError(f"{where}: name that of a checkout of this project with --manifests DIR")


def _gpu(name: str) -> str:
    if device_named(name) is None:
        raise ConfigurationError(f"--gpu is {name[:100]!r}: use one of {', '.join(known_devices())}")
    return name


def _path(typed: str) -> Path:
    try:
        return expanded(typed)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _found(directory: Path, model: str, place: Place) -> tuple[str, str]:
    """A model as the configuration has it, and its name on the hub, "" for a directory or a server.

    A cluster finds the hub's models on a volume. A relative directory that is there now is made absolute.
    """
    if is_hub_name(Path(model)):
        model = f"{SCHEME}{model}"
    if model.startswith(SCHEME):
        name = hub_name(model)
        if name.is_data:
            raise ConfigurationError(f"{model} is a data set: a model is hf://OWNER/MODEL")
        return (f"/models/{Path(name.repo).name}" if place == "kubernetes" else model), name.repo
    return _model_from(directory, model), ""


def _model_from(directory: Path, model: str) -> str:
    if Path(model).is_absolute() or (directory / model).exists() or not Path(model).exists():
        return model
    return os.path.abspath(model)


def report(project: Project) -> str:
    """What was written, and what to do next."""
    answers = project.answers
    lines = [f"wrote {', '.join(project.files)} in {one_line(answers.directory)}"]
    if project.columns is not None:
        lines.append(f"columns: {one_line(project.columns)}")
        if lost := project.columns.suspicious:
            lines.append(
                f"warning: {one_line(', '.join(lost))}: left out, and may be a part of the question; context_columns or "
                "choices_column in run.toml shows it"
            )
    lines += ["", "Next:", ""]
    lines.append(f"    cd {shlex.quote(str(answers.directory))}")
    if project.needs_tiny_model:
        lesson = " --programs" if answers.kind == "code" else ""
        lines.append(f"    gspo model tiny {answers.model}{lesson}      # the model to start from; about a minute")
    elif not (
        answers.hub_name or answers.place == "kubernetes" or (answers.directory / answers.model / "config.json").is_file()
    ):
        where = shlex.quote(one_line(answers.model))
        lines.append(f"    # put the model into {where}: a directory with config.json and weights")
    gpus = f" --gpu {answers.gpu_name} --gpus {answers.num_gpus}" if answers.place in ("node", "kubernetes") else ""
    elsewhere = " --elsewhere" if answers.place == "kubernetes" else ""
    lines.append(f"    gspo check run.toml{elsewhere}{gpus}")
    lines += _on_kubernetes(project) if answers.place == "kubernetes" else ["    gspo run run.toml"]
    return "\n".join(lines)


def _on_kubernetes(project: Project) -> list[str]:
    files = f"{project.answers.manifests}/components/keys/files"
    sandboxes = (
        f"    kubectl apply -k {shlex.quote(project.answers.manifests)}/sandbox      # once; it says how its key is made"
    )
    return [
        *([sandboxes] if project.answers.kind == "code" else []),
        f"    gspo keys {shlex.quote(files)}      # once; operator.secret is yours",
        "    mkdir -p rendered && kubectl kustomize . > rendered/all.yaml && gspo check --kubernetes rendered",
        "    kubectl apply -k . --server-side      # your registry is in kustomization.yaml",
        f"    kubectl -n gspo scale deployment/rollout --replicas={project.plan.num_servers}",
    ]


if __name__ == "__main__":
    sys.exit(main())
