"""How far the log-probs of two engines may be apart."""

from pathlib import Path

from gspo_services.rollout.sglang.client import Engine

TOLERANCE = 2e-5


async def load(engine: Engine, checkpoint: Path, version: int) -> None:
    await engine.pause("retract")
    await engine.update_weights_from_disk(checkpoint, version)
    await engine.resume()
