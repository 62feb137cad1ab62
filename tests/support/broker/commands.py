"""Commands that are typed beside a broker without a run around it."""

import asyncio

from tests.support.cli.typed import gspo

ALONE = {"rollout": {"num_servers": 0, "metrics_port": 0}, "learner": {"metrics_port": 0}}


async def command(*words: str) -> tuple[int, str]:
    done = await asyncio.to_thread(gspo, *words)
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())
