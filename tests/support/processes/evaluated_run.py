"""A run's directory with an evaluation in its ledger, a tokenizer, and as many lines in metrics.jsonl as wanted."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.shared.settings import override_settings, write_run_settings
from gspo_services.shared.settings.sections import Settings
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with
from tests.support.broker.ledger_training import R1

NUM_TASKS = 3
VOCABULARY = 10_000


def write_evaluated_run(directory: Path, *overrides: str) -> None:
    """Held-out rewards 0.5, 1.0 and 1.5 of version 1; no batch was trained."""
    model = directory / "model"
    model.mkdir(parents=True)
    # The ledger's tests number tokens by trajectory, up to some thousands.
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"w{index}" for index in range(VOCABULARY))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = override_settings(Settings(), [f"run.directory={directory}", f"model.path={model}", *overrides])
    config = config_with(evaluate_every_batches=1, num_eval_tasks=NUM_TASKS)
    world = LedgerHarness(config, path=directory / LEDGER_FILE)
    write_run_settings(settings)  # As the broker does: after the ledger.
    world.hello(LEARNER, "learner")
    world.hello(R1)
    world.publish(1, 0)
    for place, lease in enumerate(world.lease(R1, NUM_TASKS, 1)):
        world.episode(R1, lease, 1, reward=(place + 1) / 2, num_tokens=4 + place)
    assert world.lines[-1]["event"] == "eval"
    world.store.close()
    (directory / "metrics.jsonl").write_text(json.dumps({"line": 1, **world.lines[-1], "time": 1.5e9, "time_s": 1.0}) + "\n")


def rows(first: int, end: int) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl number ``first`` to ``end``: batches, evaluations, a drop and a batch that is trained again."""
    return [_row(number) for number in range(first, end)]


def _row(number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"line": number, "time": 1.5e9 + number / 8, "time_s": number / 8}
    match number % 10:
        case 3:
            return {**row, "event": "dropped", "reason": "stale", "num_tokens": [number]}
        case 7:
            row |= {"event": "eval", "batch": number, "policy_version": number, "eval/reward": 1 / number}
            return row | {"num_finished": 9, "num_failed": 0}
        case 8:
            again = True
            number -= 2
        case _:
            again = False
    measures = {
        "loss": 1 / 3 - number,
        "clip_fraction/lag_1": None,
        "clip_fraction/all": 1e-9 * number,
        "tokens_per_s": 1e7 / number,
    }
    measures |= {
        "train/reward": number / 7,
        "train/reward/right: exact?": -number / 11,
        "lag/max": number % 3,
        "policy_version": number,
    }
    return {**row, "event": "batch", "batch": number, "again": again, **measures}


def append(directory: Path, lines: list[dict[str, Any]]) -> None:
    """Write them as the broker does."""
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
