"""A digest of the settings that all processes of one run must share."""

import hashlib
import json

from services.runtime.settings.sections import Settings


def run_fingerprint(settings: Settings) -> str:
    """Digest over tasks, sampling, batches, seed and the model's directory name; 32 hexadecimal characters.

    It leaves out what processes may see differently (paths, ports), and what may change when a run is resumed (number of
    batches, evaluation, objective, learning rate).
    """
    agreed = {
        "seed": settings.run.seed,
        "model": settings.model.path.name,
        "environment": settings.environment.model_dump(mode="json"),
        # The members of a group are compared, and different rollouts may grade them.
        "reward": {"on_deadline": settings.reward.on_deadline},
        "sampling": settings.sampling.model_dump(mode="json"),
        "batch": settings.batch.model_dump(mode="json"),
    }
    if settings.agent.is_used:
        shared = {"function", "command", "on_deadline", "on_replay", "weights", "renderer", "template_arguments"}
        agreed["agent"] = settings.agent.model_dump(mode="json", include=shared)
    canonical = json.dumps(agreed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
