"""Starts and stops an SGLang server as a child process: unchanged on CUDA, through the platform plug-in on a CPU."""

import asyncio
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import structlog

from gspo.model_files.text_model import is_tower
from gspo_services.rollout.sglang.http import EngineHttp, EngineUnreachable
from gspo_services.rollout.sglang.output import ServerOutput
from gspo_services.shared.net import held_port
from gspo_services.shared.placement import this_machine
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.runtime.log_files import USUAL_LIMITS, LogFile, LogLimits, read_end
from gspo_services.shared.settings import TEXT_ALONE, model_config
from gspo_services.shared.weights import ONE_RANK, PATCHER, SUMMER, Spread

log = structlog.get_logger()

_TETHER: Final = Path(__file__).with_name("tether.py")
_POLL_S: Final = 0.1
_HEALTH_TIMEOUT_S: Final = 30.0
_PROGRESS_S: Final = 5.0
_TERM_GRACE_S: Final = 1.0
_TAIL_LINES: Final = 25
_TAIL_BYTES: Final = 64 * 1024
DECODE_STEPS: Final = 8
"""Decode steps between two prefill passes, in which requests begin (on CPU)."""
PREFILL_TOKENS: Final = 1024
"""Tokens of a prefill pass (on CPU)."""
SHORT_TOKENS: Final = 64
"""Sequences up to this length have no prefix cache (on CPU): to keep one costs more than to compute a prompt again."""
_PYTHON_ERROR: Final = re.compile(r"^(?:(?:\w+\.)*\w*(?:Error|Exception)|[\w.-]+: error): .+", re.MULTILINE)
"""The last line of a traceback, or what argparse says."""
_NOISE: Final = (" - leaked ", " - ... skipped", "nanobind: ", "See https://nanobind", "warnings.warn(")
"""Every SGLang process writes these lines when it ends; they would push the error out of the tail."""
_SHARED: Final = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_mq_")
"""The load that a server's processes report to each other, and 24 MiB through which its ranks talk."""
_LISTED: Final = "load_files"


class ServerError(RuntimeError):
    """The server could not be started, or it died; the text has the end of its log."""


class ServerStartError(ServerError):
    """The server ended with this Python error before it was ready. The text has no time and no process number in it."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The model to serve, and the address."""

    model_path: Path
    log_path: Path
    """The server's output is appended here."""
    log_limits: LogLimits = USUAL_LIMITS
    dtype: str = "float32"
    float32_head: bool = False
    """Logits are computed in float32, whatever the dtype."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    weight_version: int = 0
    """The version of the weights in ``model_path``; every token carries it until an update."""
    max_total_tokens: int = 65536
    """Size of the KV cache on CPU, where SGLang would take most of the machine's memory. On CUDA SGLang measures."""
    max_running: int = 64
    """Most requests under way. On CPU a new one waits for others to begin with while three quarters of this number run."""
    longest_tokens: int | None = None
    """The longest sequence that is asked for, with its prompt; None: not known."""
    spread: Spread = ONE_RANK
    """The server's ranks. On a CPU each gets a part of the cores of this process."""
    lora_args: tuple[str, ...] = ()
    """What lets the server hold adapters. On a CPU it computes them in plain PyTorch."""
    extra_args: tuple[str, ...] = ()
    """More arguments for sglang.launch_server; they come last, so they win."""
    start_timeout_s: float = 600.0
    colocated: bool = False
    """Its memory can be released while the learner has the device. On a CPU no memory is, and SGLang needs no option."""
    kept_open: int | None = None
    """An open file that the server's process keeps until it ends: the lock of the device on which it starts."""


def _temporary_directory(log_path: Path) -> Path:
    """Return the directory of temporary files of the server that writes this log.

    The log gives the name, so that a rollout that starts again after a kill removes what the former one left.
    """
    digest = hashlib.blake2b(os.fsencode(log_path.resolve()), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"gspo-sglang-{digest}"


def _remove_former(temporary: Path) -> None:
    """Remove what a killed server left: its temporary files, and those in shared memory that it listed there."""
    if (temporary / _LISTED).is_file():
        for name in (temporary / _LISTED).read_text(encoding="utf-8", errors="replace").splitlines():
            if name.startswith(_SHARED) and Path(name).parent == Path(_SHARED[0]).parent:
                Path(name).unlink(missing_ok=True)
    if temporary.exists():
        shutil.rmtree(temporary)


class EngineServer:
    """One SGLang server process and everything that it starts. Use as a context manager: ready inside, gone after.

    The server dies with the thread that entered the context (PR_SET_PDEATHSIG), even if SIGKILL ends that thread.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._port = options.port
        self.temporary = _temporary_directory(options.log_path)
        self._load_files: set[Path] = set()
        self._output: ServerOutput | None = None

    @property
    def url(self) -> str:
        """The address of the server; its port is known after the start."""
        return f"http://{self._options.host}:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id, which is also its session and process group."""
        return self._started.pid

    async def __aenter__(self) -> Self:
        """Start and wait until ready. Raises: ServerError."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the process and return once it has generated a token. Raises: ServerError, with nothing left running."""
        if self._process is not None:
            raise ValueError(f"the server at {self.url} was started already: make a new EngineServer")
        with _held_port(self._options.host, self._options.port) as self._port:
            await self._start()

    async def _start(self) -> None:
        cuda = bool(this_machine(os.environ).gpus)
        command = server_command(self._options, port=self._port, cuda=cuda)
        try:
            self._options.log_path.parent.mkdir(parents=True, exist_ok=True)
            output = ServerOutput(LogFile(path=self._options.log_path, limits=self._options.log_limits))
        except OSError as error:
            raise ServerError(f"{self._options.log_path}: the server's log cannot be written: {error.strerror}") from error
        # Otherwise its files (metrics, sockets, a lock for each path from which an update failed) would stay.
        try:
            _remove_former(self.temporary)
            self.temporary.mkdir(mode=0o700)
        except OSError as error:
            output.close_sink()
            raise ServerError(f"{self.temporary}: no directory for SGLang's temporary files: {error.strerror}") from error
        ranks = self._options.spread.num_ranks
        environment = server_environment(os.environ, cuda=cuda, ranks=ranks) | temporary_files(self.temporary)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=output.sink, stderr=asyncio.subprocess.STDOUT,
                env=environment, start_new_session=True,
                pass_fds=() if self._options.kept_open is None else (self._options.kept_open,),
            )  # fmt: skip
        finally:
            output.close_sink()
        self._output = output
        log.info("engine_server_started", pid=self.pid, url=self.url, cuda=cuda, log=str(self._options.log_path))
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._wait_ready()
        except TimeoutError as error:
            await self.stop()
            raise ServerError(
                f"the SGLang server at {self.url} was not ready within {self._options.start_timeout_s:.0f} s; "
                f"the end of {self._options.log_path}:\n{self.log_tail()}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def wait_dead(self) -> str:
        """Wait until the server has died; return its exit status and the end of its log, as text."""
        status = await self._started.wait()
        if self._output is not None:
            await asyncio.to_thread(self._output.drain)
        return f"the SGLang server ended with status {status}; the end of {self._options.log_path}:\n{self.log_tail()}"

    async def stop(self) -> None:
        """End the server and everything that it started: SIGTERM, and SIGKILL after 1 s. A second call does nothing.

        SGLang looks for a SIGTERM only every 5 s and then waits for its requests, which are no longer needed.
        """
        if self._process is None:
            return
        process, tree = self._process, _tree(self._process.pid)
        self._load_files |= load_files(member.pid for member in tree)
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_TERM_GRACE_S):
                    await process.wait()
            except TimeoutError:
                pass
        for member in {*tree, *_tree(process.pid)}:
            # Only if it is still the same process: psutil compares start times.
            if member.is_running():
                _kill(member)
        await process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
        for path in self._load_files:
            path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """Return the last lines of the server's log, without the lines that every exit adds."""
        if not self._options.log_path.exists():
            return "(no log)"
        lines = read_end(self._options.log_path, _TAIL_BYTES).rstrip("\n").split("\n")
        return "\n".join([line for line in lines if not any(noise in line for noise in _NOISE)][-_TAIL_LINES:])

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise ValueError("the server was not started")
        return self._process

    async def _wait_ready(self) -> None:
        """Poll /health, which answers 503 until the server is warm."""
        waited_s, reported_s = 0.0, 0.0
        clock = asyncio.get_running_loop().time
        begin = clock()
        async with aclosing(EngineHttp(self.url, timeout_s=_HEALTH_TIMEOUT_S, stall_timeout_s=_HEALTH_TIMEOUT_S)) as http:
            while True:
                if self._started.returncode is not None:
                    raise self._start_error(await self.wait_dead())
                try:
                    if await http.status("/health", timeout_s=_HEALTH_TIMEOUT_S) == HTTPStatus.OK:
                        break
                except EngineUnreachable:
                    pass  # The server does not listen yet.
                self._list_load_files()
                await asyncio.sleep(_POLL_S)
                waited_s = clock() - begin
                if waited_s - reported_s >= _PROGRESS_S:
                    reported_s = waited_s
                    last = "" if self._output is None else self._output.end.rstrip().rpartition("\n")[2]
                    log.info("engine_server_starting", waited_s=round(waited_s), last_line=last[:200])
        self._list_load_files()
        log.info("engine_server_ready", pid=self.pid, url=self.url, start_s=round(clock() - begin, 1))

    def _start_error(self, end: str) -> ServerError:
        """What ended the server: the last Python error that it printed, if it printed one, or the ``end`` of its log."""
        errors = [] if self._output is None else _PYTHON_ERROR.findall(self._output.end)
        if not errors:
            return ServerError(end)
        return ServerStartError(f"the SGLang server cannot start: {errors[-1]}; its log is {self._options.log_path}")

    def _list_load_files(self) -> None:
        """List these files on disk for the next process, in case this one and the server are killed, even at the start."""
        found = load_files(member.pid for member in _tree(self.pid))
        if not found <= self._load_files:
            self._load_files |= found
            (self.temporary / _LISTED).write_text("\n".join(map(str, sorted(self._load_files))), encoding="utf-8")


def _takes_images(options: ServerOptions) -> bool:
    """Tell whether the model's class also takes images. Raises: ServerError."""
    if not (options.model_path / "config.json").is_file():
        return False  # SGLang says what is missing.
    try:
        return is_tower(model_config(options.model_path))
    except ConfigurationError as error:
        raise ServerError(str(error)) from error


def server_command(options: ServerOptions, *, port: int, cuda: bool) -> list[str]:
    """Return the server's command line.

    Raises: ServerError for arguments that would open the server to other hosts, and for a config.json that cannot be read.
    """
    if any(argument == "--host" or argument.startswith("--host=") for argument in options.extra_args):
        raise ServerError(
            "rollout.server_args set --host: anyone who reaches SGLang's API can replace the weights, so it stays on "
            f"{options.host}; leave --host out, or start your own server and set rollout.server_url"
        )
    module = "sglang.launch_server" if cuda else "gspo_services.shared.sglang_cpu.launch"
    command = [
        *module_command(module),
        "--model-path", str(options.model_path),
        "--dtype", options.dtype,
        "--host", options.host,
        "--port", str(port),
        "--weight-version", str(options.weight_version),
        # Token ids in, token ids out: nothing is detokenised, and pieces hold new tokens only.
        "--skip-tokenizer-init",
        "--incremental-streaming-output",
        "--enable-metrics",
        # A group's requests come together, and after a weight update all requests do. One request of each prompt goes
        # first; the others find the prompt in the cache. SGLang's default takes them as they come.
        "--schedule-policy", "lpm",
        "--custom-weight-loader", PATCHER, SUMMER,
        # On a GPU SGLang would put DeepSeek's and GLM's shared experts among the others, where nothing could be compared.
        "--disable-shared-experts-fusion",
    ]  # fmt: skip
    if _takes_images(options):
        # It gets text alone. SGLang then needs no processor of images, and does not make Qwen3.5's other tower.
        command += TEXT_ALONE
    if not cuda:
        # SGLang honours sampling seeds only in deterministic mode. That is free here; on CUDA it costs throughput, so ask
        # for it in extra_args. An idle scheduler spins, and on a CPU it takes a core from other processes.
        command += [
            "--enable-deterministic-inference",
            "--sleep-on-idle",
            # Nothing is compiled: a warm-up would only take two seconds.
            "--skip-server-warmup",
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--max-total-tokens", str(options.max_total_tokens),
            # Each request has a state where attention is linear. By default SGLang takes most of the memory for them.
            "--max-mamba-cache-size", str(options.max_running),
            # Each new request would get its own pass, which costs as much as about ten tokens while all others wait.
            # So the requests that come within eight decode steps begin together.
            "--prefill-decode-interval", str(DECODE_STEPS),
            "--prefill-decode-interval-min-bs", str(options.max_running * 3 // 4),
            # Then the others of a group wait for a next pass, as this one is full.
            "--chunked-prefill-size", str(PREFILL_TOKENS),
        ]  # fmt: skip
        if options.longest_tokens is not None and options.longest_tokens <= SHORT_TOKENS:
            command.append("--disable-radix-cache")
    if options.colocated and cuda:
        # Needs torch_memory_saver, which SGLang's GPU wheels bring; without that package SGLang refuses to start.
        command.append("--enable-memory-saver")
    if options.float32_head:
        command.append("--enable-fp32-lm-head")
    spread = options.spread
    sizes = {"--tp-size": spread.tensor, "--ep-size": spread.expert, "--dp-size": spread.data}
    command += [word for option, size in sizes.items() if size > 1 for word in (option, str(size))]
    command += options.lora_args
    if options.lora_args and not cuda:
        command += ["--lora-backend", "torch_native"]
    return [*command, *options.extra_args]


def server_environment(environment: Mapping[str, str], *, cuda: bool, ranks: int = 1) -> dict[str, str]:
    """Return the server's environment: ours, offline; on a CPU with the platform plug-in and one thread in each of its
    ranks.
    """
    result = {**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # /health would generate a token after the warm-up, and look a second later whether it is there.
    result["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if not cuda:
        # SGLANG_USE_CPU_ENGINE needs compiled kernels, which exist only for CUDA machines. With two threads on a busy
        # machine OpenMP's spinning made the server up to 50 times slower.
        result.pop("SGLANG_USE_CPU_ENGINE", None)
        result |= {"SGLANG_PLATFORM": "torch_cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if ranks > 1:
            # Without it SGLang wants a NUMA node for each rank.
            result["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(sorted(os.sched_getaffinity(0)), ranks)
    return result


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Each rank's part of these cores, as SGLang reads it; where there are fewer, ranks share them in turn."""
    if len(cores) < ranks:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    ends = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cores[begin:end])) for begin, end in pairwise(ends))


def temporary_files(directory: Path) -> dict[str, str]:
    """Variables that keep a server's temporary files below ``directory``, except compiled code, for the next one."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    metrics = directory / "metrics"
    metrics.mkdir()
    return {"TMPDIR": str(directory), "PROMETHEUS_MULTIPROC_DIR": str(metrics), "TORCHINDUCTOR_CACHE_DIR": compiled}


def load_files(pids: Iterable[int]) -> set[Path]:
    """Files in shared memory through which these processes of a server talk to each other.

    SGLang gives them a random name, accepts no directory for them and leaves them when it is killed, some even when it ends.
    """
    found = set()
    for pid in pids:
        with suppress(OSError):  # It has ended, or there is no /proc.
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {line[line.index(start) :] for line in lines for start in _SHARED if start in line}
    return {Path(name) for name in found if not name.endswith(" (deleted)")}


@contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port for the server while it starts. Raises: ServerError that names a taken port."""
    with ExitStack() as stack:
        try:
            held = stack.enter_context(held_port(host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} on {host} cannot be used for the SGLang server ({error.strerror}): choose another, or 0"
            ) from error
        yield held


def _tree(pid: int) -> set[psutil.Process]:
    """Return the process, its descendants, and orphaned processes of its session."""
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                members.add(process)
        except (ProcessLookupError, PermissionError):
            continue
    with suppress(psutil.NoSuchProcess):
        members |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
    return members


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
