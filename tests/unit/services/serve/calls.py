"""Bodies of calls, as clients send them."""

from typing import Any

import numpy as np

from gspo_services.serve.schema import FLOAT32, INT64, ForwardBackwardRequest


def fill(message: Any, values: Any, kind: int) -> None:
    array = np.asarray(values, dtype=np.float32 if kind == FLOAT32 else np.int64)
    message.dtype, message.dense = kind, array.tobytes()
    message.shape.extend(array.shape)


def request(loss: str = "ppo", *, tokens: Any = (5, 6, 7), copies: int = 1, **given: Any) -> Any:
    """A call of equal datums; ``given`` replaces the inputs, None leaves one out."""
    plain = {"target_tokens": [6, 7, 8], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]}
    if loss == "cross_entropy":
        plain = {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]}
    message = ForwardBackwardRequest(model_id="s:train:0", seq_id=4, loss_fn=loss)
    for _ in range(copies):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype=np.int32).tobytes()
        for name, values in {**plain, **given}.items():
            if values is not None:
                fill(datum.loss_fn_inputs[name], values, INT64 if name == "target_tokens" else FLOAT32)
    return message
