"""Decides, before anything is loaded, whether a model can score the tokens of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gspo.model_files.configuration import read_config
from gspo_services.learner.start.long_context import position_limit, require_sequence_parallel
from gspo_services.shared.settings import Settings


def require_teacher(settings: Settings, model_dir: Path) -> dict[str, Any] | None:
    """Return the config.json of ``distillation.teacher``; None where there is none. ``model_dir``: the policy's.

    Only what tokens are called must agree, and how they are numbered: a text is never encoded again. A model's vocabulary is
    often padded, and the teacher's may be larger.
    Raises: ValueError naming both values when the teacher cannot score every sequence of the run.
    """
    if not settings.distillation.directory:
        return None
    teacher_dir = Path(settings.distillation.directory)
    try:
        config, own = read_config(teacher_dir), read_config(model_dir)
        _require_same_tokens(teacher_dir, model_dir)
        sizes = [int(each.get("vocab_size") or 0) for each in (config, own)]
        if sizes[0] < sizes[1]:
            raise ValueError(
                f"its vocabulary (vocab_size) is {sizes[0]} and the policy's {sizes[1]}: it has no log-probs of the rest"
            )
        longest, limit = settings.largest_sampling.max_tokens, position_limit(config)
        if limit is not None and longest > limit:
            raise ValueError(f"it has {limit} positions and sampling.max_tokens is {longest}; lower it to {limit}")
        together = settings.learner.sequence_parallel
        require_sequence_parallel(config, together, num_ranks=settings.learner.num_ranks * settings.learner.num_nodes)
    except ValueError as error:
        raise ValueError(f"distillation.teacher is {teacher_dir}: {error}") from error
    return config


def _require_same_tokens(teacher_dir: Path, model_dir: Path) -> None:
    theirs, ours = (_tokens(directory / "tokenizer.json") for directory in (teacher_dir, model_dir))
    differing = sorted(number for number in theirs.keys() | ours.keys() if theirs.get(number) != ours.get(number))
    if differing:
        first = differing[0]
        raise ValueError(
            f"its tokenizer has {len(theirs)} tokens and the policy's {len(ours)}; the first that differs has id {first}: "
            f"{_named(theirs, first)} there, {_named(ours, first)} here. Take a teacher with the policy's tokenizer"
        )


def _named(tokens: dict[int, str], number: int) -> str:
    return repr(tokens[number][:50]) if number in tokens else "none"


def _tokens(path: Path) -> dict[int, str]:
    """Each token by its id."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file, and both models must have the same tokens; save the tokenizer there")
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    # The tokenizers package raises bare Exception for every malformed file.
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    return {number: token for token, number in vocabulary.items()}
