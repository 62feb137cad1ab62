"""Runs to look at in a browser, and the server that shows them."""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer, models

from gspo.diagnostics import SequenceStats
from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.reading import open_run
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.settings.run_settings import write_run_settings
from gspo_services.shared.settings.sections import AgentSection, Run, Settings
from gspo_services.shared.token_dump import TokenPart, write_part
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.broker.peers import tokens_of
from tests.support.processes.small_run import FIRST, write_small_run

HOSTILE: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&lt;b>"
LOW, HIGH = -3e-4, 4e-4
BATCH: Final = 1


WILD: Final = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x1b]8;;http://x\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31m\x85\r",
    "\u202egnorw si sihT",
    "\u2066\u2067\u200f",
    "a\u200bb\u2060\ufeff\u200d",
    "e" + "\u0301" * 400,
    "W" * 2000,
    "</script><script>document.title='owned'</script>",
    "nul\0",
    "\u05d0\u05d1\u05d2 1 2",
    "\U0001f468\u200d\U0001f469",
)
"""Texts that move, hide, turn round, or grow over others; the last two are those of people."""
WILD_LOG: Final = (
    {"event": "lease_expired", "peer": "rollout-0", "trajectory_id": 8, "reason": "".join(WILD[:6]) + "\ud800"},
    {"event": "attempt_failed", "peer": "\u202e" + "P" * 500, "group_id": 1, "reason": "\x1b[31m\udfff"},
)


def write_shown_run(directory: Path, texts: Sequence[str] = (HOSTILE,), log: Sequence[dict[str, object]] = ()) -> TokenPart:
    """A small run whose tokens are these hostile texts in turn, and what a learner would record for one batch of it, with
    clipped sequences. ``log``: lines of its broker's log. Returns the record."""
    write_small_run(directory)
    export = directory / "export"
    export.mkdir()
    # As LedgerHarness numbers its tokens.
    ids = [token_id for trajectory in range(22) for token_id in tokens_of(trajectory, 12).tolist() if token_id]
    vocabulary = {"<|end|>": 0, **{f"{texts[token_id % len(texts)]}{token_id} ": token_id for token_id in ids}}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>")).save(str(export / "tokenizer.json"))
    (export / "config.json").write_text(json.dumps({"vocab_size": 1 + max(ids), "eos_token_id": 0}))
    (export / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "{{ messages }}"}))
    (directory / "logs").mkdir()
    lines = [
        json.dumps({"service": "broker", "timestamp": "2026-11-21T12:00:00Z", "level": "warning", **line}) for line in log
    ]
    (directory / "logs" / "broker.log").write_text("".join(f"{line}\n" for line in lines))
    part = recorded_part(directory, BATCH)
    write_part(directory, part, rank=0, world_size=1)
    return part


def write_self_play(directory: Path) -> int:
    """A group whose policy played white once, or black, and their rewards. Returns the trajectory in which it was black."""
    directory.mkdir()
    broker = LedgerHarness(path=directory / LEDGER_FILE)
    agent = AgentSection(function="game:solve", roles=["white", "black"])
    write_run_settings(Settings(run=Run(directory=directory), agent=agent))
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    leases = broker.lease(FIRST, 2)
    for role, lease in enumerate(leases):
        broker.grow(FIRST, lease, 3, 1)
        broker.finish(FIRST, lease, 3, reward=0.25, components={"white": 1.0, "black": -0.75}, turn_roles=[role])
    broker.store.close()
    return leases[1].trajectory_id


def recorded_part(directory: Path, batch: int) -> TokenPart:
    """Numbers for every trained token of a batch: the first sequence lies far above its clip range, the others inside."""
    with open_run(directory) as run:
        recorded = run.batch(batch)
        assert recorded is not None
        members = [member for group in run.groups_of_batch(batch) for member in group.members]
        tokens = [run.tokens(member.trajectory_id) for member in members]
    columns = tuple(SequenceStats.__dataclass_fields__)
    counts = np.array([int(each.is_trained_T.sum()) for each in tokens], np.int64)
    log_s = np.array([0.0123456789, *[1e-5 * at for at in range(1, len(members))]])
    table = {name: np.zeros(len(members)) for name in columns}
    table |= {
        "num_tokens_S": counts.astype(float),
        "lag_S": np.array([member.lag or 0.0 for member in members]),
        "log_ratio_S": log_s,
        "clip_low_S": np.full(len(members), LOW),
        "clip_high_S": np.full(len(members), HIGH),
        "clipped_high_S": (log_s > HIGH).astype(float),
        "advantage_S": np.full(len(members), 0.7071068),
        "weight_S": np.ones(len(members)),
        "entropy_S": np.full(len(members), 0.5),
    }
    behaviour = np.concatenate([each.logprobs_T[each.is_trained_T] for each in tokens])
    per_token = np.repeat(log_s, counts).astype(np.float32)
    return TokenPart(
        batch=batch,
        policy_version=recorded.policy_version,
        trajectories_S=np.array([member.trajectory_id for member in members], np.int64),
        places_S=np.zeros(len(members), np.int64),
        steps_S=np.zeros(len(members), np.int64),
        counts_S=counts,
        columns=columns,
        stats_SC=np.stack([table[name] for name in columns], 1),
        learner_T=behaviour + per_token,
        start_T=behaviour,
        ratio_T=np.exp(per_token),
        entropy_T=np.full(len(behaviour), 0.5, np.float32),
        advantage_T=np.full(len(behaviour), 0.7071068, np.float32),
        clip_T=(per_token > HIGH).astype(np.uint8),
    )


class ShownRuns:
    """A server of the page: its address and its process."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address.rstrip("/")
        self.pid = pid

    @property
    def memory_bytes(self) -> int:
        """Its own memory, now."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def shown(directories: Sequence[Path], cache: Path) -> Iterator[ShownRuns]:
    """``gspo view`` of these runs on a free port, until the block ends."""
    words = ["view", *map(str, directories), "--port", "0", "--cache", str(cache)]
    process = subprocess.Popen(module_command("gspo_services.cli.main", *words), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield ShownRuns(found[0], process.pid)
    finally:
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout is not None
        process.stdout.close()
