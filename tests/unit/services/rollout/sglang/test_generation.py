"""The engine's answers, also nonsensical ones."""

import json
import re
import struct
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.messages import VersionRun
from gspo_services.rollout.sglang.generation import (
    GenerateRequest,
    Output,
    OutputDecoder,
    RequestRefused,
    SamplingParameters,
    VersionTagger,
    parse_version,
    version_runs,
)
from tests.support.engines.pieces import a_piece


def event(token_ids: list[int], completion_tokens: int, *, finish: Any = None, **meta: Any) -> bytes:
    logprobs = [[-0.5 * token, token, None] for token in token_ids]
    fields = {
        "completion_tokens": completion_tokens,
        "weight_version": "3",
        "finish_reason": finish,
        "output_token_logprobs": logprobs,
        **meta,
    }
    return json.dumps({"output_ids": token_ids, "meta_info": fields}).encode()


@pytest.mark.parametrize("incremental", [True, False])
def test_each_token_comes_out_once_whether_the_server_repeats_them_or_not(incremental: bool) -> None:
    decoder = OutputDecoder(incremental=incremental)
    all_tokens = [5, 6, 7, 8]
    received: list[int] = []
    for start, end in ((0, 1), (1, 3), (3, 4)):
        sent = all_tokens[start:end] if incremental else all_tokens[:end]
        output = decoder.decode(event(sent, end, finish={"type": "length"} if end == 4 else None))
        assert output.logprobs.tolist() == [-0.5 * token for token in output.token_ids]
        received += output.token_ids.tolist()
    assert received == all_tokens
    assert output.finish_reason == "length"
    assert output.spans == [(3, 0, 4)], "without spans the one version is taken for all tokens"


def test_the_last_token_that_sglang_repeats_when_a_queued_request_is_aborted_is_not_taken_twice() -> None:
    decoder = OutputDecoder(incremental=True)
    decoder.decode(event([5], 1))
    # Two answers that SGLang joined: tokens 6 and 7, and the abort that repeats 7 and all log-probs.
    joined = event([6, 7, 7], 3, finish={"type": "abort", "message": "Abort in waiting queue"})
    fields = json.loads(joined)
    fields["meta_info"]["output_token_logprobs"] = [[-float(token), token, None] for token in (6, 7, 5, 6, 7)]
    output = decoder.decode(json.dumps(fields).encode())
    assert output.token_ids.tolist() == [6, 7]
    assert output.logprobs.tolist() == [-6.0, -7.0]
    again = OutputDecoder(incremental=True)
    again.decode(event([5, 6], 2))
    assert again.decode(event([6], 2, finish={"type": "abort"})).token_ids.tolist() == []


def test_a_log_prob_is_rounded_to_float32_and_a_token_id_keeps_all_its_bits() -> None:
    highest, logprob = 2**31 - 1, -0.1234567890123
    given = OutputDecoder(incremental=True).decode(event([highest], 1, output_token_logprobs=[[logprob, highest, None]]))
    assert (given.token_ids.dtype, given.logprobs.dtype) == (np.int32, np.float32)
    assert given.token_ids.tolist() == [highest]
    assert given.logprobs.tolist() == [struct.unpack("f", struct.pack("f", logprob))[0]]


@pytest.mark.parametrize("logprob", [0.5, -4e38])
def test_a_log_prob_that_cannot_be_one_is_named_with_its_place_among_all_tokens(logprob: float) -> None:
    decoder = OutputDecoder(incremental=True)
    decoder.decode(event([5, 6], 2))
    sent = [[-1.0, 7, None], [logprob, 8, None], [0.25, 9, None]]
    with pytest.raises(ValueError, match=re.escape(f"token 3 has log-prob {logprob}: expected a log-prob (<= 0)")):
        decoder.decode(event([7, 8, 9], 5, output_token_logprobs=sent))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"output_ids": "x"}',
        event([5], 2),
        event([5, 6], 2, output_token_logprobs=[[-1.0, 5, None]]),
        event([5], 1, output_token_logprobs=[[-1.0, 6, None]]),
        event([5], 1, output_token_logprobs=[[None, 5, None]]),
        event([5], -1),
        event([5], 1, weight_version="default"),
        event([5], 1, finish={"type": "exploded"}),
        event([5, 6], 2, finish={"type": "stop"}, weight_versions=[{"version": "1", "start": 1, "end": 2}]),
        event([5, 6], 2, finish={"type": "stop"}, weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        event([5, 6], 2, finish={"type": "stop"}, weight_versions=[{"version": "x", "start": 0, "end": 2}]),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(payload: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        OutputDecoder(incremental=True).decode(payload)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_but_the_documented_errors(payload: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        OutputDecoder(incremental=True).decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error": {"message": "context too long"}}',
        event([], 0, finish={"type": "abort", "message": "context too long", "status_code": 400}),
    ],
)
def test_a_refusal_of_the_server_is_reported_with_its_reason(payload: bytes) -> None:
    with pytest.raises(RequestRefused, match="context too long"):
        OutputDecoder(incremental=True).decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error": {"message": "out of memory", "code": 500}}',
        event([], 0, finish={"type": "abort", "message": "out of memory", "status_code": 503}),
    ],
)
def test_a_failure_of_the_server_is_not_a_refusal_of_the_request(payload: bytes) -> None:
    with pytest.raises(ValueError, match="out of memory") as raised:
        OutputDecoder(incremental=True).decode(payload)
    assert not isinstance(raised.value, RequestRefused)


def output(token_ids: list[int], version: int, spans: list[tuple[int, int, int]] | None = None) -> Output:
    return Output(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(len(token_ids), -1.0, dtype=np.float32),
        server_version=version,
        finish_reason=None if spans is None else "stop",
        spans=spans,
    )


def test_tokens_that_an_update_may_have_touched_wait_for_the_exact_spans() -> None:
    tagger = VersionTagger()
    first = tagger.push(output([1, 2], 7), certain=True)
    assert first is not None
    assert first.version_runs == [VersionRun(7, 2)]
    assert tagger.push(output([3, 4, 5], 8), certain=False) is None
    assert tagger.num_held == 3
    last = tagger.push(output([6], 8, spans=[(7, 0, 4), (8, 4, 6)]), certain=False)
    assert last is not None
    assert last.token_ids.tolist() == [3, 4, 5, 6]
    assert last.version_runs == [VersionRun(7, 2), VersionRun(8, 2)]
    assert last.finish_reason == "stop"


def test_a_version_that_another_client_changed_holds_the_tokens_back() -> None:
    tagger = VersionTagger()
    tagger.push(output([1], 7), certain=True)
    assert tagger.push(output([2], 8), certain=True) is None


def test_small_pieces_wait_until_they_are_worth_sending() -> None:
    tagger = VersionTagger(piece_tokens=4)
    assert tagger.push(output([1], 7), certain=True) is None
    piece = tagger.push(output([2, 3, 4, 5], 7), certain=True)
    assert piece is not None
    assert piece.token_ids.dtype == np.int32
    assert piece.logprobs.dtype == np.float32
    assert piece.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_the_tagger_counts_what_it_gave_out_and_knows_the_last_token() -> None:
    tagger = VersionTagger()
    assert (tagger.num_given, tagger.last_given) == (0, None)
    tagger.push(output([1, 2], 7), certain=True)
    tagger.push(output([3], 7), certain=False)
    assert (tagger.num_given, tagger.last_given, tagger.num_held) == (2, 2, 1)
    tagger.push(output([], 7, spans=[(7, 0, 3)]), certain=False)
    assert (tagger.num_given, tagger.last_given, tagger.num_held) == (3, 3, 0)


def test_the_beginning_of_a_piece_has_its_log_probs_and_versions() -> None:
    piece = a_piece([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], (7, 2), (8, 2))
    first = piece.first(3)
    assert (first.token_ids.tolist(), first.logprobs.tolist()) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert first.version_runs == [VersionRun(7, 2), VersionRun(8, 1)]
    assert piece.first(2).version_runs == [VersionRun(7, 2)]
    assert piece.first(0).version_runs == []
    assert piece.first(9) is piece


@given(lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=8), skip=st.integers(0, 20))
def test_version_runs_are_the_spans_token_by_token(lengths: list[tuple[int, int]], skip: int) -> None:
    spans, per_token = [], []
    for version, length in lengths:
        spans.append((version, len(per_token), len(per_token) + length))
        per_token += [version] * length
    runs = version_runs(spans, skip)
    assert [run.version for run in runs for _ in range(run.num_tokens)] == per_token[skip:]
    assert all(run.num_tokens > 0 for run in runs)
    assert all(one.version != next_one.version for one, next_one in pairwise(runs))


@pytest.mark.parametrize("text", ["default", "", "-1", "1.5", "١", "0x1"])
def test_a_version_that_is_not_a_number_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--weight-version"):
        parse_version(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_sampling_parameters_out_of_range_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParameters(**{"max_new_tokens": 1, **bad})


@pytest.mark.parametrize("rid", ["", "a#b", "a;"])
def test_a_request_id_that_could_be_the_beginning_of_another_is_refused(rid: str) -> None:
    with pytest.raises(ValueError, match="rid"):
        GenerateRequest(rid=rid, input_ids=[1], sampling=SamplingParameters(max_new_tokens=1))
    with pytest.raises(ValueError, match="input_ids"):
        GenerateRequest(rid="a", input_ids=[], sampling=SamplingParameters(max_new_tokens=1))
