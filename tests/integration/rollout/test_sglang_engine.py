"""The engine client against a real SGLang server: log-probs, versions, weight updates, verification."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from gspo_protocol.messages import TensorInfo, VersionRun
from gspo_services.rollout.sglang.client import Engine, EngineError, EngineUnreachable, PauseMode
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters
from gspo_services.rollout.sglang.server_process import EngineServer, ServerError, ServerOptions
from tests.integration.conftest import SglangServer
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, checkpoint_tensors, reference_logprobs
from tests.support.wire.engine_files import write_safetensors
from tests.support.wire.verified import verify_loaded

PROMPT = [10, 20, 30, 40]
TOLERANCE = 2e-5
"""Float32 against float32: only the order of additions differs."""
PATIENCE_S = 60.0


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client; afterwards the server holds its base checkpoint as version 0 again and is not paused."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
        yield client
        await client.control("/abort_request", {"abort_all": True}, timeout_s=PATIENCE_S)
        await update(client, sglang_server.base, 0)


async def update(engine: Engine, checkpoint: Path, version: int, mode: PauseMode = "retract") -> None:
    await engine.pause(mode)
    await engine.update_weights_from_disk(checkpoint, version)
    await engine.resume()


def long_request(rid: str, num_tokens: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        rid=rid, input_ids=PROMPT, sampling=SamplingParameters(max_new_tokens=num_tokens, ignore_eos=True, **sampling)
    )


def dict_of(tensors: list[tuple[TensorInfo, bytes]]) -> dict[str, tuple[TensorInfo, bytes]]:
    return {info.name: (info, data) for info, data in tensors}


async def collect(engine: Engine, request: GenerateRequest) -> list[OutputPiece]:
    return [piece async for piece in engine.generate(request)]


def joined(pieces: list[OutputPiece]) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All token ids, log-probs and versions of an answer."""
    token_ids = [int(token) for piece in pieces for token in piece.token_ids]
    logprobs = np.concatenate([piece.logprobs for piece in pieces])
    versions = [np.full(run.num_tokens, run.version) for piece in pieces for run in piece.version_runs]
    return token_ids, logprobs, np.concatenate(versions) if versions else np.array([])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_transformers_at_the_sampling_temperature(
    engine: Engine, sglang_server: SglangServer, temperature: float
) -> None:
    pieces = await collect(engine, long_request("t", 60, temperature=temperature, seed=1))
    token_ids, logprobs, versions = joined(pieces)
    expected = reference_logprobs(sglang_server.base_model, PROMPT + token_ids, temperature)[len(PROMPT) - 1 :]
    assert np.abs(logprobs - expected).max() < TOLERANCE
    assert versions.tolist() == [0] * 60
    assert pieces[-1].finish_reason == "length"
    first, *others = (len(piece.token_ids) for piece in pieces[:-1])
    # A server that is slow to send puts several sixteens into one piece.
    assert (first > 1, first % 16) == (True, 1), "the first token comes alone and waits"
    assert all(number % 16 == 0 for number in others)


async def test_a_short_answer_is_one_piece_and_concurrent_answers_are_not_mixed_up(
    engine: Engine, sglang_server: SglangServer
) -> None:
    answers = await asyncio.gather(*(collect(engine, long_request(f"r{i}", 12, seed=i)) for i in range(24)))
    assert {len(pieces) for pieces in answers} == {1}
    assert len({tuple(joined(pieces)[0]) for pieces in answers}) == 24
    for pieces in answers[:4]:
        token_ids, logprobs, _ = joined(pieces)
        expected = reference_logprobs(sglang_server.base_model, PROMPT + token_ids)[len(PROMPT) - 1 :]
        assert np.abs(logprobs - expected).max() < TOLERANCE


async def test_the_same_seed_gives_the_same_tokens_also_when_resumed_in_the_middle(engine: Engine) -> None:
    first, _, _ = joined(await collect(engine, long_request("a", 40, seed=7)))
    again, _, _ = joined(await collect(engine, long_request("b", 40, seed=7)))
    other, _, _ = joined(await collect(engine, long_request("c", 40, seed=8)))
    assert first == again
    assert first != other
    rest = GenerateRequest(
        rid="d", input_ids=PROMPT + first[:15], sampling=SamplingParameters(max_new_tokens=25, ignore_eos=True, seed=7)
    )
    assert joined(await collect(engine, rest))[0] == first[15:]


async def test_an_answer_ends_with_the_stop_token_that_was_sampled(engine: Engine) -> None:
    free, _, _ = joined(await collect(engine, long_request("free", 30, seed=3)))
    stop = free[10]
    sampling = SamplingParameters(max_new_tokens=30, seed=3, stop_token_ids=(stop,))
    pieces = await collect(engine, GenerateRequest(rid="stopped", input_ids=PROMPT, sampling=sampling))
    token_ids, logprobs, _ = joined(pieces)
    assert token_ids == free[: free.index(stop) + 1]
    assert len(logprobs) == len(token_ids)
    assert pieces[-1].finish_reason == "stop"


async def test_an_aborted_request_delivers_its_tokens_so_far(engine: Engine) -> None:
    pieces: list[OutputPiece] = []
    async for piece in engine.generate(long_request("gone", 3000, seed=1)):
        pieces.append(piece)
        if len(pieces) == 1:
            await engine.control("/abort_request", {"abort_all": True}, timeout_s=PATIENCE_S)
    token_ids, logprobs, versions = joined(pieces)
    assert pieces[-1].finish_reason == "abort"
    assert 17 <= len(token_ids) < 3000
    assert len(logprobs) == len(versions) == len(token_ids)


async def test_tokens_on_both_sides_of_an_update_have_the_log_probs_of_their_own_version(
    engine: Engine, sglang_server: SglangServer
) -> None:
    pieces: list[OutputPiece] = []
    async for piece in engine.generate(long_request("long", 400, seed=5)):
        pieces.append(piece)
        if len(pieces) == 2:
            await update(engine, sglang_server.other, 1)
    token_ids, logprobs, versions = joined(pieces)
    assert len(token_ids) == 400
    assert pieces[-1].finish_reason == "length"
    num_old = int((versions == 0).sum())
    assert versions.tolist() == [0] * num_old + [1] * (400 - num_old)
    assert 33 <= num_old < 400
    for model, part in ((sglang_server.base_model, slice(0, num_old)), (sglang_server.other_model, slice(num_old, 400))):
        expected = reference_logprobs(model, PROMPT + token_ids)[len(PROMPT) - 1 :]
        assert np.abs(logprobs - expected)[part].max() < TOLERANCE
    wrong = reference_logprobs(sglang_server.base_model, PROMPT + token_ids)[len(PROMPT) - 1 :]
    assert np.abs(logprobs - wrong)[num_old] > 0.01, "the first new token would show a wrong boundary"


async def test_pieces_continue_after_an_update_when_many_tokens_are_held_back(
    sglang_server: SglangServer, engine: Engine
) -> None:
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16, hold_limit_tokens=32) as impatient:
        pieces: list[OutputPiece] = []
        async for piece in impatient.generate(long_request("long", 300, seed=5)):
            pieces.append(piece)
            if len(pieces) == 2:
                await update(impatient, sglang_server.other, 1)
    token_ids, logprobs, versions = joined(pieces)
    assert len(token_ids) == 300
    assert pieces[-1].finish_reason == "length"
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    after = [piece for piece in pieces if piece.version_runs[-1].version == 1]
    assert len(after) > 4, "held back to the end"
    num_old = int((versions == 0).sum())
    expected = reference_logprobs(sglang_server.other_model, PROMPT + token_ids)[len(PROMPT) - 1 :]
    assert np.abs(logprobs - expected)[num_old:].max() < TOLERANCE


async def test_no_prefix_computed_under_old_weights_is_used_after_an_update(
    engine: Engine, sglang_server: SglangServer
) -> None:
    prompt = [(7 * i) % 500 + 3 for i in range(300)]

    async def first_logprobs(rid: str) -> tuple[list[int], np.ndarray[Any, Any]]:
        request = GenerateRequest(
            rid=rid, input_ids=prompt, sampling=SamplingParameters(max_new_tokens=8, ignore_eos=True, seed=2)
        )
        token_ids, logprobs, _ = joined(await collect(engine, request))
        return token_ids, logprobs

    await first_logprobs("warm")
    await update(engine, sglang_server.other, 1)
    token_ids, logprobs = await first_logprobs("new")
    expected = reference_logprobs(sglang_server.other_model, prompt + token_ids)[len(prompt) - 1 :]
    assert np.abs(logprobs - expected).max() < TOLERANCE

    # In place the cache is not flushed: the same comparison must show it, or it could not have shown it above.
    await update(engine, sglang_server.base, 2, mode="in_place")
    token_ids, logprobs = await first_logprobs("stale")
    expected = reference_logprobs(sglang_server.base_model, prompt + token_ids)[len(prompt) - 1 :]
    assert np.abs(logprobs - expected).max() > 0.01


async def test_loaded_weights_are_verified_bit_by_bit(engine: Engine, sglang_server: SglangServer) -> None:
    base, other = checkpoint_tensors(sglang_server.base), checkpoint_tensors(sglang_server.other)
    assert (await verify_loaded(engine, base)).ok
    await engine.pause()
    await engine.update_weights_from_disk(sglang_server.other, 1)
    verification = await verify_loaded(engine, other)
    assert (verification.ok, verification.unverified) == (True, [])
    wrong_version = await verify_loaded(engine, base)
    assert not wrong_version.ok
    [only] = await engine.weights_checksums()
    assert len(wrong_version.mismatched) == len(only.checksums)
    info, data = other[0]
    one_bit = [(info, bytes([data[0] ^ 1]) + data[1:]), *other[1:]]
    assert len((await verify_loaded(engine, one_bit)).mismatched) == 1
    await engine.resume()


async def test_a_file_with_some_tensors_changes_these_and_no_others(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    """Also parts of merged parameters: one of q, k and v, one matrix of one expert; a norm, the output layer."""
    changed = {
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.experts.1.gate_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    base, other = checkpoint_tensors(sglang_server.base), dict_of(checkpoint_tensors(sglang_server.other))
    assert changed <= other.keys()
    write_safetensors(tmp_path / "model.safetensors", [other[name] for name in sorted(changed)])
    await update(engine, tmp_path, 1)
    mixed = [other[info.name] if info.name in changed else (info, data) for info, data in base]
    verification = await verify_loaded(engine, mixed)
    assert (verification.ok, verification.unverified) == (True, [])
    assert len((await verify_loaded(engine, base)).mismatched) >= 5


async def test_a_weight_name_that_the_server_skips_in_silence_is_caught(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    renamed = [
        (replace(info, name=info.name.replace("experts.1.down_proj", "experts_1.down_proj")), data)
        for info, data in checkpoint_tensors(sglang_server.other)
    ]
    write_safetensors(tmp_path / "model.safetensors", renamed)
    await update(engine, tmp_path, 1)
    assert await engine.weight_version() == 1, "the server claims success"
    verification = await verify_loaded(engine, renamed)
    assert not verification.ok
    assert sorted(verification.missing) == [f"model.layers.{i}.mlp.experts_1.down_proj.weight" for i in range(2)]
    truth = await verify_loaded(engine, checkpoint_tensors(sglang_server.other))
    assert sorted(truth.mismatched) == [f"model.layers.{i}.mlp.experts.w2_weight" for i in range(2)]


def lock_files(path: Path) -> list[Path]:
    """SGLang's lock files for ``path`` in the shared temporary directory."""
    return list(Path(tempfile.gettempdir()).glob(f"*{str(path).replace('/', '-')}.lock"))


async def test_after_a_failed_update_nothing_is_generated_until_one_succeeds(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path
) -> None:
    with pytest.raises(EngineError):
        await update(engine, tmp_path / "nothing-here", 1)
    # SGLang makes a lock file for a path without weights; it must not lie in the shared temporary directory.
    assert not lock_files(tmp_path / "nothing-here")
    with pytest.raises(EngineError, match="weights are unknown"):
        await collect(engine, long_request("x", 4))
    await update(engine, sglang_server.other, 2)
    pieces = await collect(engine, long_request("x", 4))
    assert pieces[0].version_runs == [VersionRun(2, 4)]


async def test_a_token_outside_the_vocabulary_never_reaches_the_server(engine: Engine) -> None:
    request = GenerateRequest(rid="bad", input_ids=[TINY_VOCAB_SIZE], sampling=SamplingParameters(max_new_tokens=1))
    with pytest.raises(ValueError, match="512"):
        await collect(engine, request)
    assert len(await collect(engine, long_request("good", 1))) == 1


async def test_prompt_log_probs_probe_the_weights(engine: Engine, sglang_server: SglangServer) -> None:
    token_ids = [5, 100, 300, 12, 45, 460]
    expected = reference_logprobs(sglang_server.base_model, token_ids)
    assert np.abs(await prompt_logprobs(engine.url, token_ids) - expected).max() < TOLERANCE


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        async with Engine("http://127.0.0.1:9"):
            pass


async def test_a_server_that_cannot_start_says_why(sglang_server: SglangServer, tmp_path: Path) -> None:
    options = ServerOptions(model_path=tmp_path / "no-model", log_path=tmp_path / "log", start_timeout_s=200)
    with pytest.raises(ServerError, match="no-model"):
        async with EngineServer(options):
            pass
    taken = int(sglang_server.url.rpartition(":")[2])
    with pytest.raises(ServerError, match=f"port {taken}"):
        await EngineServer(ServerOptions(model_path=sglang_server.base, log_path=tmp_path / "log", port=taken)).start()
