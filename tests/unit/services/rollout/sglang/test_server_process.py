"""How the server is started, and that it dies with the process that started it."""

import asyncio
import mmap
import os
import signal
import socket
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from prometheus_client import CollectorRegistry

from gspo_services.rollout.__main__ import _engine, _shared, server_options
from gspo_services.rollout.sglang.server_info import ServerInfo
from gspo_services.rollout.sglang.server_process import (
    EngineServer,
    ServerError,
    ServerOptions,
    ServerStartError,
    cores_of_ranks,
    load_files,
    server_command,
    server_environment,
    temporary_files,
)
from gspo_services.shared.colocate import LOCK_FILE, DeviceLock
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.weights import Spread

TETHER = Path(__file__).parents[5] / "services" / "rollout" / "sglang" / "tether.py"


def options(**changes: object) -> ServerOptions:
    return ServerOptions(**{"model_path": Path("/m"), "log_path": Path("/log"), "weight_version": 7, **changes})  # type: ignore[arg-type]


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_on_cpu_the_plug_in_serves_with_a_bounded_cache_on_one_thread() -> None:
    command = server_command(options(max_total_tokens=999), port=1234, cuda=False)
    assert command[:4] == [sys.executable, "-P", "-m", "gspo_services.shared.sglang_cpu.launch"]
    assert value(command, "--max-total-tokens") == "999"
    assert value(command, "--weight-version") == "7"
    assert value(command, "--dtype") == "float32"
    assert "--enable-deterministic-inference" in command
    environment = server_environment({"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "64", "HOME": "/h"}, cuda=False)
    assert "SGLANG_USE_CPU_ENGINE" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["SGLANG_PLATFORM"] == "torch_cpu"
    assert environment["HOME"] == "/h"


def test_a_model_that_also_takes_images_is_served_for_text_alone(tmp_path: Path) -> None:
    flag, config = "--json-model-override-args", tmp_path / "config.json"
    assert flag not in server_command(options(model_path=tmp_path), port=1, cuda=True)
    config.write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    assert flag not in server_command(options(model_path=tmp_path), port=1, cuda=True)
    config.write_text('{"model_type": "qwen3_5", "text_config": {}}')
    assert value(server_command(options(model_path=tmp_path), port=1, cuda=True), flag) == '{"language_model_only": true}'
    config.write_text('{"model_type": "qwen3_5"}')
    with pytest.raises(ServerError, match="text_config of a qwen3_5 model is None"):
        server_command(options(model_path=tmp_path), port=1, cuda=True)


def test_on_cpu_requests_begin_together_one_of_each_prompt_first_unless_the_arguments_say_otherwise() -> None:
    command = server_command(options(max_running=24), port=1234, cuda=False)
    assert value(command, "--prefill-decode-interval") == "8"
    assert value(command, "--prefill-decode-interval-min-bs") == "18", "with a quarter of the places free none waits"
    assert value(command, "--chunked-prefill-size") == "1024"
    assert "--prefill-decode-interval" not in server_command(options(), port=1234, cuda=True)


def test_on_cpu_sequences_that_are_all_short_have_no_prefix_cache() -> None:
    without = "--disable-radix-cache"
    for longest, cuda, expected in ((64, False, True), (65, False, False), (None, False, False), (64, True, False)):
        assert (without in server_command(options(longest_tokens=longest), port=1, cuda=cuda)) is expected
    short = ["sampling.max_tokens=64", "sampling.max_turn_tokens=8"]
    assert server_options(load_settings(None, short), "rollout-0").longest_tokens == 64
    with_set = [*short, "evaluation.every_batches=1", "evaluation.sets.hard.max_tokens=128"]
    assert server_options(load_settings(None, with_set), "rollout-0").longest_tokens == 128


@pytest.mark.parametrize("cuda", [False, True])
def test_requests_that_share_a_prompt_find_it_in_the_cache(cuda: bool) -> None:
    assert value(server_command(options(), port=1234, cuda=cuda), "--schedule-policy") == "lpm"
    other = server_command(options(extra_args=("--schedule-policy", "fcfs")), port=1234, cuda=cuda)
    assert other[::-1][other[::-1].index("--schedule-policy") - 1] == "fcfs", "the last one counts"


def test_a_rollouts_settings_reach_its_server() -> None:
    changes = {"max_running": 24, "max_total_tokens": 512, "server_args": ["--log-level", "info"], "server_port": 77}
    changes |= {"tensor_parallel": 4, "expert_parallel": 2, "data_parallel": 3}
    settings = load_settings(None, [f"rollout.{name}={value}" for name, value in changes.items()])
    made = server_options(settings, "rollout-3")
    assert (made.max_running, made.max_total_tokens, made.extra_args, made.port) == (24, 512, ("--log-level", "info"), 77)
    assert made.spread == Spread(tensor=4, expert=2, data=3)
    assert made.log_path == settings.run.directory / "logs" / "rollout-3-sglang.log"


class _Informed:
    """An engine that says how its server was started."""

    def __init__(self, has_float32_head: bool | None, quantization: str | None = None) -> None:
        self._has, self._quantization = has_float32_head, quantization

    async def server_info(self) -> ServerInfo:
        return ServerInfo(
            version="0", device="cpu", dtype="bfloat16", tp_size=1, model_path="m", enable_fp32_lm_head=self._has,
            quantization=self._quantization,
        )  # fmt: skip


async def test_a_float32_head_is_asked_of_a_server_and_one_that_was_started_without_is_refused() -> None:
    head = "--enable-fp32-lm-head"
    for chosen in (False, True):
        settings = load_settings(None, [f"model.float32_head={chosen}".lower(), "model.dtype=bfloat16"])
        made = server_options(settings, "rollout-3")
        assert [head in server_command(made, port=1, cuda=cuda) for cuda in (True, False)] == [chosen] * 2
        for has in (False, True, None):
            engine = _Informed(has)
            if chosen and has is False:
                with pytest.raises(ConfigurationError, match=f"float32_head is true.*start it with {head}, or set"):
                    await _shared(settings, engine)  # type: ignore[arg-type]
            else:
                assert await _shared(settings, engine) == 1  # type: ignore[arg-type]


async def test_a_server_that_quantises_is_refused_before_it_gets_weights() -> None:
    with pytest.raises(ConfigurationError, match="started with --quantization fp8"):
        await _shared(load_settings(None, []), _Informed(None, "fp8"))  # type: ignore[arg-type]


def test_a_server_reports_experts_only_where_they_are_replayed() -> None:
    replaying = ["objective.routing_replay=true", "objective.routing_replay_from=engine"]
    for overrides, reports in ((replaying, True), (replaying[:1], False), ([], False)):
        made = server_options(load_settings(None, overrides), "rollout-3")
        assert ("--enable-return-routed-experts" in server_command(made, port=1, cuda=True)) == reports


def test_a_server_that_shall_hold_adapters_is_told_how_many() -> None:
    overrides = [
        "lora.rank=8",
        "lora.publish=adapter",
        "lora.max_loaded_loras=4",
        'rollout.server_args=["--log-level","info"]',
    ]
    made = server_options(load_settings(None, overrides), "rollout-3")
    on_cpu, on_gpu = (server_command(made, port=1, cuda=cuda) for cuda in (False, True))
    for command in (on_cpu, on_gpu):
        assert "--enable-lora" in command
        assert (value(command, "--max-lora-rank"), value(command, "--max-loras-per-batch")) == ("8", "5")
        first = command.index("--lora-target-modules")
        assert command[first + 1 : first + 5] == ["q_proj", "k_proj", "v_proj", "o_proj"]
        assert command[-2:] == ["--log-level", "info"], "they come last, so they win"
    assert value(on_cpu, "--lora-backend") == "torch_native"
    assert "--lora-backend" not in on_gpu, "SGLang knows its own best"
    merged = server_options(load_settings(None, ["lora.rank=8"]), "rollout-3")
    assert "--enable-lora" not in server_command(merged, port=1, cuda=False)


def test_a_server_that_shares_its_device_can_release_the_memory_of_a_gpu_and_keeps_the_lock_until_it_ends(
    tmp_path: Path,
) -> None:
    settings = load_settings(None, ["rollout.num_servers=1", "run.colocate=true"])
    with closing(DeviceLock(tmp_path / LOCK_FILE, "rollout-0")) as lock:
        made = server_options(settings, "rollout-0", lock)
        assert (made.colocated, made.kept_open) == (True, lock.fileno())
    alone = server_options(settings, "rollout-0")
    assert (alone.colocated, alone.kept_open) == (False, None)
    saver = "--enable-memory-saver"
    # The saver is a library for CUDA: on a CPU SGLang would not start with it, and answers the same calls without.
    assert [saver in server_command(one, port=1, cuda=cuda) for one in (made, alone) for cuda in (True, False)] == [
        True, False, False, False
    ]  # fmt: skip


async def test_a_model_that_its_ranks_cannot_share_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    settings = load_settings(None, [f"model.path={tmp_path}", "rollout.tensor_parallel=4"])

    async def refusal() -> str:
        with pytest.raises(ConfigurationError) as caught:
            await _engine(settings, "rollout-0", 10, CollectorRegistry()).__aenter__()
        return str(caught.value)

    assert "config.json cannot be read" in await refusal()
    config = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 6, "vocab_size": 64, "intermediate_size": 64}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert "num_attention_heads is 6, which 4 ranks do not divide; use rollout.tensor_parallel = 2" in await refusal()


def test_on_cuda_the_stock_server_runs_and_further_arguments_come_last() -> None:
    command = server_command(options(extra_args=("--log-level", "info")), port=1234, cuda=True)
    assert command[:4] == [sys.executable, "-P", "-m", "sglang.launch_server"]
    assert "--max-total-tokens" not in command
    assert command[-2:] == ["--log-level", "info"]
    assert "SGLANG_PLATFORM" not in server_environment({}, cuda=True)
    assert not {"--tp-size", "--ep-size", "--dp-size"} & set(command)


def test_a_server_of_several_ranks_is_told_so_and_on_a_cpu_which_cores_they_have() -> None:
    command = server_command(options(spread=Spread(tensor=4, expert=2, data=3)), port=1234, cuda=True)
    assert [value(command, name) for name in ("--tp-size", "--ep-size", "--dp-size")] == ["4", "2", "3"]
    assert [cores_of_ranks([0, 2, 3, 5, 7], ranks) for ranks in (2, 3)] == ["0,2|3,5,7", "0|2,3|5,7"]
    assert cores_of_ranks([1, 4], 5) == "1|4|1|4|1"
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    assert server_environment({}, cuda=False, ranks=2)[name].count("|") == 1
    assert name not in server_environment({}, cuda=False) | server_environment({}, cuda=True, ranks=2)


def test_a_servers_temporary_files_have_a_directory_of_their_own_except_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache")
    files = temporary_files(tmp_path)
    assert files == {
        "TMPDIR": str(tmp_path),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
        "TORCHINDUCTOR_CACHE_DIR": "/cache",
    }
    assert (tmp_path / "metrics").is_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    other = tmp_path / "other"
    other.mkdir()
    compiled = Path(temporary_files(other)["TORCHINDUCTOR_CACHE_DIR"])
    assert compiled.name == f"torchinductor_{os.getuid()}"
    assert tmp_path not in compiled.parents


def test_the_files_with_which_a_servers_processes_report_their_load_are_found_while_one_is_open() -> None:
    path = Path(f"/dev/shm/sglang_loads_test-{os.getpid()}.shm")
    queue, other = Path(f"/dev/shm/sgl_shm_mq_{os.getpid()}_00"), Path(f"/dev/shm/other-{os.getpid()}.shm")
    files = [os.open(each, os.O_CREAT | os.O_RDWR, 0o600) for each in (path, other, queue)]
    try:
        for file in files:
            os.ftruncate(file, mmap.PAGESIZE)
        with mmap.mmap(files[0], mmap.PAGESIZE), mmap.mmap(files[1], mmap.PAGESIZE), mmap.mmap(files[2], mmap.PAGESIZE):
            assert load_files([os.getpid(), 2**22 + 1]) == {path, queue}, "the second of them is no process"
            path.unlink()
            queue.unlink()
            assert load_files([os.getpid()]) == set()
    finally:
        for file in files:
            os.close(file)
        for each in (path, other, queue):
            each.unlink(missing_ok=True)
    assert load_files([os.getpid()]) == set()


@pytest.mark.parametrize("arguments", [("--host", "0.0.0.0"), ("--host=0.0.0.0",)])
def test_a_server_of_ours_stays_on_this_host(arguments: tuple[str, ...]) -> None:
    assert value(server_command(options(), port=1234, cuda=True), "--host") == "127.0.0.1"
    with pytest.raises(ServerError, match=r"set --host.*set rollout\.server_url"):
        server_command(options(extra_args=arguments), port=1234, cuda=True)


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1"):
            await EngineServer(options(port=port, log_path=tmp_path / "log")).start()


async def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match=r"file/logs/rollout-0-sglang\.log: the server's log cannot be written: Not a dir"):
        await EngineServer(options(log_path=tmp_path / "file" / "logs" / "rollout-0-sglang.log")).start()


async def test_a_server_removes_the_temporary_files_that_a_killed_one_of_its_log_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = EngineServer(options(log_path=tmp_path / "logs" / "rollout-0-sglang.log", start_timeout_s=0.1))
    killed = EngineServer(options(log_path=tmp_path / "logs" / "rollout-0-sglang.log")).temporary
    (killed / "metrics").mkdir(parents=True)
    load_file, stranger = f"/dev/shm/sglang_loads_{os.getpid()}_test.shm", tmp_path / "sglang_loads_of_nobody.shm"
    os.close(os.open(load_file, os.O_CREAT))
    stranger.touch()
    (killed / "load_files").write_text(f"{load_file}\n{stranger}\n/dev/shm/sglang_loads_/../../{stranger}\n")
    other = EngineServer(options(log_path=tmp_path / "logs" / "rollout-1-sglang.log")).temporary
    other.mkdir()
    with pytest.raises(ServerError, match="was not ready within 0 s"):
        await server.start()
    assert not killed.exists()
    assert not os.access(load_file, os.F_OK)
    assert stranger.exists()
    assert other.exists()


async def test_the_files_of_a_server_that_is_killed_before_it_is_ready_are_on_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_file = Path(f"/dev/shm/sglang_loads_{os.getpid()}_starting.shm")
    opens_and_hangs = (
        f"import mmap, os, signal; file = os.open({str(load_file)!r}, os.O_CREAT | os.O_RDWR); os.ftruncate(file, 4096); "
        "shared = mmap.mmap(file, 4096); signal.pause()"
    )
    command = [sys.executable, "-c", opens_and_hangs]
    monkeypatch.setattr("gspo_services.rollout.sglang.server_process.server_command", lambda *_, **__: command)
    server = EngineServer(options(log_path=tmp_path / "logs" / "rollout-0-sglang.log", start_timeout_s=60))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(server.start())
        while not (listed := server.temporary / "load_files").is_file():
            assert not starting.done()
            await asyncio.sleep(0.02)
        assert listed.read_text() == str(load_file)
        starting.cancel()
    await server.stop()
    assert not os.access(load_file, os.F_OK)


def test_the_tail_of_the_log_leaves_out_the_noise_of_every_exit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("ValueError: the reason\nnanobind: leaked 64 types!\n" + ' - leaked type "x"\n' * 100)
    assert EngineServer(options(log_path=path)).log_tail() == "ValueError: the reason"


async def test_a_tethered_process_dies_when_its_parent_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c",
        "import os, subprocess, sys\n"
        f"command = [sys.executable, {str(TETHER)!r}, str(os.getpid()), 'sh', '-c', 'echo $$; exec sleep 600']\n"
        "subprocess.Popen(command, start_new_session=True).wait()",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    # Written by the command itself: it runs, and the tether holds.
    child = psutil.Process(int(await asyncio.wait_for(parent.stdout.readline(), 60)))
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [child], 60)
    assert (len(gone), alive) == (1, [])


async def test_a_tethered_process_does_not_start_without_its_parent() -> None:
    stranger = await asyncio.create_subprocess_exec(sys.executable, str(TETHER), str(os.getppid()), "sleep", "600")
    assert await asyncio.wait_for(stranger.wait(), 60) == 1


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("raise RuntimeError('no kernel for Float')", "RuntimeError: no kernel for Float"),
        ("print('torch.OutOfMemoryError: CUDA out of memory\\n[12:01] killed', flush=True); import os; os._exit(1)",
         "torch.OutOfMemoryError: CUDA out of memory"),
        ("print('launch_server.py: error: unrecognized arguments: --speed')",
         "launch_server.py: error: unrecognized arguments: --speed"),
        ("import os; os.kill(os.getpid(), 9)", None),
    ],
)  # fmt: skip
async def test_a_server_that_ends_at_its_start_is_named_by_its_own_python_error_alone(
    script: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rollout-0-sglang.log"
    log.write_text("ValueError: what a server before it said\n")
    monkeypatch.setattr(
        "gspo_services.rollout.sglang.server_process.server_command", lambda *_, **__: [sys.executable, "-c", script]
    )
    with pytest.raises(ServerError) as caught:
        await EngineServer(options(log_path=log)).start()
    if error is None:
        assert type(caught.value) is ServerError
    else:
        # Nothing in it may change from one start to the next: the same text twice ends the run.
        assert type(caught.value) is ServerStartError
        assert str(caught.value) == f"the SGLang server cannot start: {error}; its log is {log}"
