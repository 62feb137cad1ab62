"""What an engine has, compared with what it should have."""

from collections.abc import Iterable

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang import Engine
from gspo_services.rollout.weights.verify import Verification, Verifier
from gspo_services.shared.weights import Buffer


async def verify_loaded(engine: Engine, tensors: Iterable[tuple[TensorInfo, Buffer]], kv_heads: int = 1) -> Verification:
    """Compare a whole version with the engine's weights; call it while paused."""
    verifier = Verifier(engine, kv_heads)
    return await verifier.verify(await verifier.expect(tensors))
