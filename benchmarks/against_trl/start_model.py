"""The model that both systems start from on the task with long-tailed answers: taught by imitation, and kept on disk.

A mixture of experts like the project's tiny model, but with some 4 million parameters, so that floating-point work is most
of the cost of a token. A careful teacher comes first, then a careless one: the model has the skill but a bad policy.
Everything follows from the seed, on one thread.

    python -m benchmarks.against_trl.start_model models/counting-0 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.against_trl.counting import Counting, CountingOptions
from benchmarks.pipeline.model import ModelSize, make_model
from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, Lesson, encode
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

SIZE: Final = ModelSize(hidden_size=192, num_hidden_layers=4, moe_intermediate_size=192)
RECORD_FILE: Final = "start_model.json"


@dataclass(frozen=True, kw_only=True)
class School:
    """How the model is taught."""

    most_careful_steps: int = 700
    """Most steps with the careful teacher: fewer if the model knows its answers earlier."""
    known_loss: float = 0.02
    """The answers are known when the mean loss of a token over the last ``window`` steps is at most this."""
    window: int = 20
    careless_steps: int = 60
    """Steps with the careless teacher, while the learning rate falls to 0."""
    step_tokens: int = 1_000
    """Tokens of a step, padding included."""
    learning_rate: float = 1e-3
    warmup_steps: int = 20


def start_model(directory: Path, seed: int, *, size: ModelSize = SIZE, school: School | None = None) -> Path:
    """Return the start model of ``seed`` in ``directory``; make it when it is missing or has other settings.

    The directory appears complete or not at all.
    """
    school = school or School()
    record = {"seed": seed, "size": asdict(size), "school": asdict(school)}
    made = directory / RECORD_FILE
    if made.is_file() and json.loads(made.read_text()) == record:
        return directory
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}.unfinished"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # One thread adds in one order on every machine.
    try:
        make_model(unfinished, size, seed)
        model = AutoModelForCausalLM.from_pretrained(unfinished, dtype=torch.float32)
        imitate(model, random.Random(seed), school)
        model.save_pretrained(unfinished)
        (unfinished / RECORD_FILE).write_text(json.dumps(record) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.rename(directory)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def imitate(model: PreTrainedModel, rng: random.Random, school: School) -> list[float]:
    """Train in place, supervised, on steps of answers of about the same length. Return the careful steps' losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=school.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    for lessons in islice(lesson_batches(rng, careful=True, step_tokens=school.step_tokens), school.most_careful_steps):
        losses.append(
            _step(model, optimizer, lessons, school.learning_rate * min(1.0, (len(losses) + 1) / school.warmup_steps))
        )
        if len(losses) >= school.window and fmean(losses[-school.window :]) <= school.known_loss:
            break
    careless = islice(lesson_batches(rng, careful=False, step_tokens=school.step_tokens), school.careless_steps)
    for step, lessons in enumerate(careless):
        _step(model, optimizer, lessons, school.learning_rate * (school.careless_steps - step) / school.careless_steps)
    return losses


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, lessons: Sequence[Lesson], learning_rate: float
) -> float:
    """Make one optimizer step; return the mean cross-entropy of the trained tokens before it."""
    pad_id = model.config.pad_token_id
    length = max(len(lesson.ids) for lesson in lessons)
    ids_BT = torch.tensor([x.ids + [pad_id] * (length - len(x.ids)) for x in lessons])
    labels_BT = torch.tensor([x.labels + [IGNORED_LABEL] * (length - len(x.labels)) for x in lessons])
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def lesson_batches(rng: random.Random, *, careful: bool, step_tokens: int) -> Iterator[list[Lesson]]:
    """Yield endless steps of lessons of about the same length, at most ``step_tokens`` tokens with padding."""
    environment, tokenizer = Counting(CountingOptions()), build_tokenizer()
    while True:
        drawn = encode(tokenizer, [environment.demonstration(rng, careful=careful) for _ in range(512)])
        drawn.sort(key=lambda lesson: len(lesson.ids))
        batches: list[list[Lesson]] = [[]]
        for lesson in drawn:
            if batches[-1] and len(lesson.ids) * (len(batches[-1]) + 1) > step_tokens:
                batches.append([])
            batches[-1].append(lesson)
        rng.shuffle(batches)
        yield from batches


def main() -> None:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.process_time()
    path = start_model(arguments.directory, arguments.seed)
    print(f"{path}: {time.process_time() - begin:.0f} s of CPU")


if __name__ == "__main__":
    main()
