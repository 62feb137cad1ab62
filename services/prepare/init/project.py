"""Puts a project together, and writes it without writing over anything."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gspo.model_files.configuration import read_config
from gspo.tasks.maths import fault_of
from gspo_services.prepare.init.choices import TINY_MODELS, Answers
from gspo_services.prepare.init.code_text import agent_code, environment_code, reward_code
from gspo_services.prepare.init.overlay import on_cluster, overlay_files
from gspo_services.prepare.init.plan import SMALL, Facts, ProjectPlan, plan_of, size_in_name
from gspo_services.prepare.init.rows import TaskRows, as_jsonl, columns_of, own_rows, sample_programs, sample_rows
from gspo_services.prepare.init.toml_text import run_toml
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.shared.estimates import Device, ModelShape, ShapeError, device_named, shape_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import SCHEME, Settings, local_path
from gspo_services.tasks.environments import LAST_MESSAGE, ColumnUse, value_at
from gspo_services.tasks.environments.maths import GSM8K_MARKER

MOST_MEASURED: Final = 200
BYTES_PER_TOKEN: Final = 3.0
"""Of text in an unknown tokenizer: a cautious guess."""
TEMPLATE_TOKENS: Final = 64
"""For roles, a system message and the like."""
MOST_GOLD_CHARS: Final = 200
"""A longer answer is a solution, and not what a small model is to say."""
TINY_PROGRAM_TOKENS: Final = 48
TINY_PARAMETERS: Final = 256_384
ENVIRONMENT_PROMPT_TOKENS: Final = 40
ENVIRONMENT_EVAL_TASKS: Final = 64
"""Of the class in my_environment.py."""
GYM_PROMPT_TOKENS: Final = {True: 120, False: 640}
"""Of the generators that are written, at their last levels: for the tiny model, whose tokens are bytes, and for others."""
GYM_EVAL_TASKS: Final = 128


@dataclass(frozen=True, kw_only=True)
class Project:
    """What is to be written."""

    answers: Answers
    plan: ProjectPlan
    files: Mapping[str, str]
    """Text by path in the directory."""
    needs_tiny_model: bool
    """The tiny model is still to be made."""
    columns: ColumnUse | None = None
    """What becomes of the columns of the person's rows."""


def make_project(answers: Answers, base: Path) -> Project:
    """``base``: where a relative path to the model starts now. Raises: ConfigurationError."""
    directory = _model_directory(answers, base)
    shape = _shape(directory)
    is_tiny = answers.model in TINY_MODELS.values() and shape is None
    parameters = TINY_PARAMETERS if is_tiny else shape.parameters if shape else size_in_name(answers.model)
    small = parameters is not None and parameters < SMALL
    rows = None
    if answers.has_files:
        rows = _rows(answers, small=small)
    facts = Facts(
        shape=shape,
        parameters=parameters,
        prompt_tokens=_own_prompt_tokens(answers, small=small)
        if rows is None
        else prompt_tokens(rows.prompts, directory, small=small),
        gold_tokens=_gold_tokens(answers, rows, directory),
        num_train=None if rows is None else len(rows.train),
        num_eval=_num_own_eval_tasks(answers) if rows is None else len(rows.held_out),
        device=_device(answers),
    )
    plan = plan_of(answers, facts)
    files = _files(answers, plan, rows)
    if answers.place == "kubernetes":
        files |= overlay_files(answers, plan, files, parameters)
    columns = rows.columns if rows is not None and answers.data is not None and answers.kind != "agent" else None
    return Project(answers=answers, plan=plan, files=files, needs_tiny_model=is_tiny, columns=columns)


def _model_directory(answers: Answers, base: Path) -> Path:
    if answers.model.startswith(SCHEME):
        return Path(local_path(answers.model, fetch=False))
    return base / answers.directory / answers.model


def _shape(directory: Path) -> ModelShape | None:
    """None when there is no model yet. Raises: ConfigurationError for a config.json that describes none."""
    if not (directory / "config.json").is_file():
        return None
    try:
        return shape_of(read_config(directory))
    except ShapeError as error:
        raise ConfigurationError(f"{directory / 'config.json'}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _device(answers: Answers) -> Device | None:
    return device_named(answers.gpu_name) if answers.gpu_name else None


def _own_prompt_tokens(answers: Answers, *, small: bool) -> int:
    return GYM_PROMPT_TOKENS[small] if answers.kind == "reasoning_gym" else ENVIRONMENT_PROMPT_TOKENS


def _num_own_eval_tasks(answers: Answers) -> int:
    return GYM_EVAL_TASKS if answers.kind == "reasoning_gym" else ENVIRONMENT_EVAL_TASKS


def _rows(answers: Answers, *, small: bool) -> TaskRows:
    columns = columns_of(answers.kind, answers.prompt_column, answers.answer_column)
    sample = sample_programs if answers.kind == "code" else sample_rows
    rows = sample(tiny=small) if answers.data is None else own_rows(answers.data, answers.eval_data, columns)
    return on_cluster(rows) if answers.place == "kubernetes" else rows


def prompt_tokens(prompts: list[str], directory: Path, *, small: bool) -> int:
    """The longest prompt: counted by the model's tokenizer where it is there, else guessed from its bytes."""
    longest = sorted(prompts, key=len, reverse=True)[:MOST_MEASURED]
    with suppress(TokenizerError):
        tokenizer = ChatTokenizer(directory)
        lengths = [len(tokenizer.prompt_ids([{"role": "user", "content": prompt}])) for prompt in longest]
        return max(lengths, default=0) + (0 if small else TEMPLATE_TOKENS)
    most = max((len(prompt.encode(errors="replace")) for prompt in longest), default=0)
    return most + 8 if small else round(most / BYTES_PER_TOKEN) + TEMPLATE_TOKENS


def _gold_tokens(answers: Answers, rows: TaskRows | None, directory: Path) -> int:
    if answers.kind == "code":
        return TINY_PROGRAM_TOKENS
    if rows is None or answers.data is None or answers.kind != "maths" or rows.answer_column == LAST_MESSAGE:
        return 0
    answers_of_rows = (str(value_at(row, rows.answer_column)) for row in (*rows.train, *rows.held_out))
    golds = [text.rpartition(GSM8K_MARKER)[2].strip() for text in answers_of_rows]
    boxed = [f"\\boxed{{{gold}}}" for gold in golds if len(gold) <= MOST_GOLD_CHARS and fault_of(gold, "symbolic") == ""]
    return prompt_tokens(boxed, directory, small=True) if boxed else 0


def _files(answers: Answers, plan: ProjectPlan, rows: TaskRows | None) -> dict[str, str]:
    text = run_toml(answers, plan, rows)
    # What is written is known to be good: a mistake of ours must not become a user's.
    Settings.model_validate(tomllib.loads(text))
    files = {"run.toml": text}
    if rows is not None and rows.is_written:
        files |= {"data/train.jsonl": as_jsonl(rows.train), "data/eval.jsonl": as_jsonl(rows.held_out)}
    match answers.kind:
        case "reward":
            files["my_reward.py"] = reward_code(rows.answer_column if rows else "", is_sample=answers.data is None)
        case "agent":
            assert rows is not None
            files["my_agent.py"] = agent_code(rows)
        case "environment":
            files["my_environment.py"] = environment_code(tiny=plan.is_small)
        case "maths" | "code" | "reasoning_gym":
            pass
    return files


def write_project(project: Project) -> None:
    """Write all files, or none. Raises: ConfigurationError when one exists, or cannot be written."""
    directory = project.answers.directory
    existing = [name for name in project.files if os.path.lexists(directory / name)]
    if existing:
        raise ConfigurationError(
            f"{directory} has {', '.join(existing)} already, and nothing is written over: choose another directory, or move "
            "them away"
        )
    written: list[Path] = []
    try:
        for name, text in project.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigurationError(f"{error.filename or directory}: {error.strerror}; nothing was written") from error
