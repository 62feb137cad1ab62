"""The pure parts of tests/storm: what is dealt, what counts as a loss, and what is an attacker's."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.agents import Episode
from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments.arithmetic import Arithmetic, ArithmeticOptions
from tests.storm import attacker
from tests.storm.attacker import BREACH, is_hostile
from tests.storm.hostile import ROLLOUT
from tests.storm.losses import honest, losses
from tests.storm.measure import Files, files_of, largest_median
from tests.storm.mixture import KINDS, Mixture, kind_of
from tests.storm.weather import Card, Event, deck, never_hit

ROLES = ("broker", "agent", "sandbox")
TASKS = Arithmetic(ArithmeticOptions()).tasks("train")


def problem(number: int) -> str:
    return str(TASKS.task(number)["problem"])


def test_a_deck_hits_each_kind_of_process_the_disk_and_the_connections() -> None:
    cards = deck(ROLES)
    for role in ROLES:
        assert {Card("kill", role), Card("suspend", role)} <= set(cards)
    assert {Card("fill the disk"), Card("cut the broker off")} <= set(cards)


def test_what_never_happened_is_named() -> None:
    cards = deck(ROLES)
    events = [Event(1.0, card, "done") for card in random.Random(0).sample(cards, len(cards))]
    assert never_hit(cards, events) == []
    left = [event for event in events if event.card not in (Card("kill", "agent"), Card("cut the broker off"))]
    assert never_hit(cards, left) == ["cut the broker off", "kill agent"]


def test_of_the_checkpoints_one_counts_as_the_best_is_kept_beside_the_newest_sooner_or_later(tmp_path: Path) -> None:
    def write(*names: str) -> Files:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(bytes(10))
        return files_of(tmp_path, ("ledger", "checkpoints/damaged"))

    ones = [f"checkpoints/version-{number}/{name}" for number in range(5) for name in ("model/a", "optimizer", "state")]
    before = write("run.json", "ledger.sqlite", "checkpoints/newest", "archive/x", *ones[:-3])
    assert before == Files(6, 60, 4)
    after = write(*ones, "checkpoints/damaged/version-1/a")
    assert after == Files(6, 60, 5)
    assert write("checkpoints/version-1/more", "checkpoints/version-2/more", "stray").number == 7
    assert largest_median([before, before, after]) == (before, after)


def failed(trajectory: int, peer: str) -> dict[str, Any]:
    return {"event": "attempt_failed", "trajectory_id": trajectory, "peer": peer, "reason": f"by {peer}"}


def dropped(group: int) -> dict[str, Any]:
    return {"event": "group_dropped", "group_id": group, "reason": "failed"}


def test_only_losses_that_no_attacker_explains_are_unjust() -> None:
    hostile = next(number for number in range(1000) if is_hostile(problem(number)))
    usual = next(number for number in range(1000) if not is_hostile(problem(number)))
    rows = [
        {"reason": "failed", "group_id": group, "prompt": prompt}
        for group, prompt in ((1, usual), (2, hostile), (3, usual), (4, usual))
    ]
    logged = [
        failed(10, "rollout-0"), failed(30, ROLLOUT), failed(10, "rollout-1"), dropped(1),
        failed(20, "rollout-0"), dropped(2), failed(30, "rollout-0"), dropped(3),
    ]  # fmt: skip
    found = losses([*rows, {"reason": "stale", "group_id": 5, "prompt": usual}], logged)
    assert [loss.peers for loss in found] == [("rollout-0", "rollout-1"), ("rollout-0",), (ROLLOUT, "rollout-0"), ()]
    assert [loss.group for loss in honest(found, is_hostile)] == [1, 4]


def test_the_mixture_is_judged_in_all_three_places() -> None:
    environment = Mixture(ArithmeticOptions())
    judged: dict[int, Any] = {}
    for number in range(200):
        task = TASKS.task(number)
        step = environment.step(environment.start(task, seed=number).state, str(eval(str(task["problem"]))))
        judged.setdefault(kind_of(str(task["problem"])), []).append(step.reward)
    assert sorted(judged) == list(range(KINDS))
    assert all(isinstance(reward, RewardJob) and reward.grader == "programs" for reward in judged[0])
    assert any("setsid" in str(reward.arguments["source"]) for reward in judged[0])
    assert all(isinstance(reward, RewardJob) and reward.function for reward in judged[1] + judged[2])
    assert all(reward == 1.0 for kind in range(3, KINDS) for reward in judged[kind])


@pytest.mark.parametrize(("act", "status", "is_breach"), [
    ("strange_keys", 200, True), ("strange_keys", 401, False), ("forged_ids", 500, True), ("forged_ids", 400, False),
])  # fmt: skip
async def test_an_attacker_notes_what_nobody_may_be_answered(
    act: str, status: int, is_breach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("GSPO_STORM_NOTES", str(notes))
    keys: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        keys.append(head.partition(b"Bearer ")[2].partition(b"\r\n")[0])
        writer.write(f"HTTP/1.1 {status} said\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    episode: Any = Episode(
        task={}, seed=0, base_url=address, api_key="own-key", model="m", ends_at=time.monotonic(), recorded=(), record=None,  # type: ignore[arg-type]
    )  # fmt: skip
    async with server:
        await getattr(attacker, act)(episode, random.Random(0))
    assert notes.read_text().startswith(BREACH) == is_breach
    assert (b"own-key" in keys) == (act == "forged_ids")
