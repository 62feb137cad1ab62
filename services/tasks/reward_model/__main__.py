"""``python -P -m gspo_services.tasks.reward_model PARENT OPTIONS``: serves one reward model. See ``server``."""

import asyncio
import os
import signal
import sys

import msgspec

from gspo_services.shared.runtime.lifecycle import die_with_parent
from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.reward_model.server import serve
from gspo_services.tasks.worker.frames import FrameSocket

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, parent_pid=int(sys.argv[1]))
    options = msgspec.json.decode(sys.argv[2], type=RewardModelOptions)
    frames = FrameSocket()
    frames.listen(lambda _: None)
    os._exit(asyncio.run(serve(options, frames.send)))
