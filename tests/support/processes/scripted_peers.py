"""A process with two scripted rollouts and a scripted learner, which work until the run is complete.

python -m tests.support.processes.scripted_peers WORK_ENDPOINT BATCH_ENDPOINT
"""

import asyncio
import sys

import zmq.asyncio

from tests.support.broker.peers import ScriptedLearner, ScriptedRollout


async def main(work: str, batch: str) -> None:
    context = zmq.asyncio.Context()
    try:
        async with asyncio.TaskGroup() as tasks:
            for name in ("r0", "r1"):
                rollout = ScriptedRollout(context, work, name, "s", action_tokens=37, chunk_delay_s=0.02)
                tasks.create_task(rollout.run())
            await ScriptedLearner(context, batch, "s", train_s=0.2).run()
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
