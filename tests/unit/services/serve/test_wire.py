"""Bodies of forward_backward: what they mean, and what is refused with which words."""

from typing import Any

import numpy as np
import pytest

from gspo_services.serve.calls import UserError
from gspo_services.serve.schema import FLOAT32, INT64, ForwardBackwardOutput, SampleResponse
from gspo_services.serve.wire import CallLimits, Sampled, call_address, read_train_call, sample_answer, train_answer
from tests.unit.services.serve.calls import fill, request

LIMITS = CallLimits(vocabulary=100, longest=8, max_datums=3, max_targets=64)


def read(message: Any) -> Any:
    return read_train_call(message.SerializeToString(), LIMITS)


def test_a_call_has_its_datums_and_options() -> None:
    message = request(copies=2)
    message.loss_fn_config["clip_low_threshold"] = 0.5
    message.loss_fn_config_v2["clip_high_threshold"].number = 1.5
    assert call_address(message.SerializeToString()) == ("s:train:0", 4)
    call = read(message)
    assert (call.loss, call.forward_only, len(call.datums)) == ("ppo", False, 2)
    assert call.options == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert call.datums[1].tokens_N.tolist() == [5, 6, 7]
    assert call.datums[1].targets.tolist() == [6, 7, 8]
    assert call.datums[1].given["logprobs"].tolist() == [0.0, -1.0, -2.0]


def test_several_targets_may_be_sparse() -> None:
    message = request("cross_entropy", target_tokens=None, weights=None)
    for name, kind, values in (("target_tokens", INT64, [9, 8]), ("weights", FLOAT32, [0.5, 0.25])):
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.dtype = kind
        tensor.shape.extend([3, 4])
        tensor.sparse_csr.values = np.asarray(values, dtype=np.int64 if kind == INT64 else np.float32).tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 2]).tobytes()
        tensor.sparse_csr.col_indices = np.array([3, 0]).tobytes()
    datum = read(message).datums[0]
    assert datum.targets.tolist() == [[0, 0, 0, 9], [0, 0, 0, 0], [8, 0, 0, 0]]
    assert datum.given["weights"].tolist() == [[0, 0, 0, 0.5], [0, 0, 0, 0], [0.25, 0, 0, 0]]
    # A few bytes must not become gigabytes.
    message.data[0].loss_fn_inputs["weights"].shape[1] = 2**40
    with pytest.raises(UserError, match="at most 64 values"):
        read(message)
    message.data[0].loss_fn_inputs["weights"].shape[1] = 2
    with pytest.raises(UserError, match="its rows, columns and values do not belong together"):
        read(message)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request("stable_reinforce"), "its formula is not public; choose one by the argument loss_fn"),
        (request(copies=4), "the call has 4 datums; send 1 to 3"),
        (request(copies=0), "the call has 0 datums"),
        (request(tokens=()), "datum 0: model_input has 0 tokens; it must have 1 to 8"),
        (request(tokens=range(9)), "model_input has 9 tokens"),
        (request(tokens=(5, 100, 7)), "model_input holds 100; the model's tokens are 0 to 99"),
        (request(target_tokens=[6, 7, -1]), "target_tokens holds -1"),
        (request(target_tokens=[6, 7]), r"target_tokens is \[2\]; it must be \[3\]"),
        (request(target_tokens=[[6], [7], [8]]), r"target_tokens is \[3, 1\]; it must be \[3\]"),
        (request(advantages=None), "loss_fn_inputs has no advantages, which ppo needs"),
        (request(advantages=[1.0, 1.0]), r"advantages is \[2\]; it must be \[3\]"),
        (request(advantages=[0.0, float("nan"), 1.0]), r"advantages\[1\] is nan; only finite values"),
        (request(logprobs=[0.0, float("-inf"), 1.0]), r"logprobs\[1\] is -inf"),
        (request(weights=[1.0, 1.0, 1.0]), "loss_fn_inputs has 'weights', which ppo does not use; it uses target_tokens, "),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_the_way_out(message: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(message)


def test_other_types_and_torn_bytes_are_refused() -> None:
    message = request()
    fill(message.data[0].loss_fn_inputs["advantages"], [], INT64)
    with pytest.raises(UserError, match="advantages is int64; it must be float32"):
        read(message)
    message = request()
    message.data[0].loss_fn_inputs["advantages"].dense = b"\0" * 7
    with pytest.raises(UserError, match="advantages has 7 bytes, which is no whole number of 4-byte values"):
        read(message)
    message.data[0].loss_fn_inputs["advantages"].dense = b"\0" * 8
    with pytest.raises(UserError, match=r"advantages has 2 values and the shape \[3\]"):
        read(message)
    message = request()

    message.data[0].model_input.add()
    with pytest.raises(UserError, match="a chunk that is no text"):
        read(message)
    with pytest.raises(UserError, match="no ForwardBackwardRequest in protobuf"):
        call_address(b"\xff\xff")


def test_answers_have_what_the_client_reads() -> None:
    answer = ForwardBackwardOutput.FromString(train_answer([np.float32([[-1, -2]]), np.float32([[-3, -4], [-5, -6]])], 2.5))
    field = answer.loss_fn_outputs[0].fields["logprobs"]
    assert (answer.metrics["loss:sum"], answer.loss_fn_outputs[0].num_datums, field.trailing_shape) == (2.5, 2, [2])
    assert np.frombuffer(field.offsets, np.int64).tolist() == [0, 8, 24]
    assert np.frombuffer(field.data, np.float32).tolist() == [-1, -2, -3, -4, -5, -6]
    topk = (np.int32([[1, 2]]), np.float32([[-0.1, -0.2]]))
    sampled = Sampled(tokens=np.int32([7]), logprobs=np.float32([-0.5]), stopped=False, topk=topk)
    response = SampleResponse.FromString(sample_answer([sampled], np.float32([np.nan, -1])))
    assert (response.sequences[0].stop_reason, response.sequences[0].topk_sampled_logprobs.k) == (1, 2)
    assert np.isnan(np.frombuffer(response.prompt_logprobs, np.float32)[0])
    assert not response.HasField("topk_prompt_logprobs")
