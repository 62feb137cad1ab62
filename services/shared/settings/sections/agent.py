"""The section of agents: users' programs that call the policy themselves."""

import math
import re
from typing import Final, Literal

from pydantic import Field, model_validator

from gspo_protocol.limits import MAX_ROLES
from gspo_services.shared.settings.sections.section import OptionalPath, Port, PositiveSeconds, Section

ROLE: Final = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)


class AgentSection(Section):
    """An agent solves each episode by itself, with any framework, through an endpoint as OpenAI and Anthropic have one.

    Without function, command or url, the environment's own start and step are used. With one of them, the environment only
    provides the tasks. See docs/guide/tasks-and-agents.md.
    """

    function: str = ""
    """The agent as "package.module:function": ``async def solve(episode)`` or a plain ``def``. It returns the reward, or its
    named components. It runs in worker processes, many episodes in each."""
    command: list[str] = Field([])
    """The agent as a program and its arguments, started once for each episode. It reads OPENAI_BASE_URL, OPENAI_API_KEY and
    GSPO_TASK, and writes its reward to GSPO_RESULT."""
    url: str = ""
    """The agent as a service: each episode is POSTed there as JSON, and the answer holds its reward."""
    python: OptionalPath = ""
    """The interpreter of ``function``, 3.10 or later, such as ".venv-agent/bin/python". Empty: the rollout's interpreter."""
    workers: int = Field(2, ge=1, le=256)
    """Worker processes of each rollout for ``function``; rollout.max_running episodes share them."""
    deadline_s: PositiveSeconds = 600.0
    """Seconds that an episode may take, including calls of the policy. Then it is ended."""
    hang_s: PositiveSeconds = 10.0
    """A worker of agent.function is killed when an episode blocks its event loop for this long, as ``time.sleep`` and long
    computations do. Time in which the machine had no processor for it, and that of imports, is not counted."""
    on_deadline: Literal["fail", "zero"] = "fail"
    """The result of an episode that took too long. fail: the attempt fails, and is repeated. zero: a reward of 0, so that
    the policy learns to finish in time; a slow engine then costs reward, too."""
    on_replay: Literal["replay", "restart", "fail"] = "replay"
    """How an episode goes on after its process or machine died. replay: the agent runs again, and what it asks again is
    answered from the record. restart: it runs again, and everything is sampled anew. fail: the attempt fails."""
    weights: dict[str, float] = Field({})
    """The weight of each component of the reward; then each must be present. Empty: the reward is their sum."""
    roles: list[str] = Field([])
    """The roles that the policy plays in an episode, such as ["white", "black"] for both sides of a game. Then each call is
    made as one of them, with the key of ``episode.role("white")``. Empty: it has one."""
    renderer: str = "auto"
    """How messages become tokens and tokens tool calls. template: the model's own chat template. auto: a family of the
    package ``renderers`` where its tokens are those of the template, else template. Or the name of a family."""
    strict: bool = False
    """Refuse calls that ask for sampling other than the run's. false: the run's is used, and a header says so."""
    host: str = "127.0.0.1"
    """Where the endpoint listens. Another address than loopback needs security.keys or security.allow_plaintext."""
    port: Port = 0
    """Port of the first rollout's endpoint; ``gspo run`` gives the next ones port + 1, + 2, ... 0: any free port."""
    advertised_url: str = ""
    """The base URL for agents if it is not http://host:port/v1, as behind a proxy. Empty: that one."""
    environment: dict[str, str] = Field({})
    """Variables for the agent's processes, which get none of ours, such as { SEARCH_URL = "http://10.0.0.5" }."""
    scratch: bool = True
    """Give each process a folder for files, removed at its end. false: it cannot write any file."""
    memory_bytes: int = Field(8 * 2**30, ge=2**27)
    """Address space of a process, libraries included."""
    cpu_s: int = Field(600, ge=1)
    """CPU seconds of a program, or of a worker since its last episode began."""

    computer: bool = False
    """Give each episode of ``function`` a computer, ``episode.computer``: files that last as long as the episode, and
    commands in a sandbox without a network, where [sandbox] says."""
    computer_bytes: int = Field(8 * 2**20, ge=2**16, le=32 * 2**20)
    """All files of one computer, which the rollout keeps in memory. What a command leaves beyond is undone."""
    computer_memory_bytes: int = Field(512 * 2**20, ge=32 * 2**20)
    """Memory of a command of a computer; at most sandbox.max_memory_bytes."""

    @model_validator(mode="after")
    def _one_kind(self) -> "AgentSection":
        given = [name for name in ("function", "command", "url") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"agent.{given[0]} and agent.{given[1]} are both set: an agent is one of them; remove one")
        if self.python and given and given != ["function"]:
            raise ValueError(f"agent.python is {self.python!r}, which is for agent.function: name it in agent.{given[0]}")
        if self.computer and not self.function:
            raise ValueError("agent.computer is true, which is for agent.function: name one, or remove agent.computer")
        if self.function and ":" not in self.function:
            raise ValueError(f'agent.function is {self.function!r}: expected "package.module:function"')
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"agent.url is {self.url!r}: it must begin with http:// or https://")
        odd = [name for name in self.roles if not ROLE.fullmatch(name)]
        if odd or len(set(self.roles)) < len(self.roles) or len(self.roles) > MAX_ROLES:
            raise ValueError(
                f"agent.roles is {self.roles!s:.200}: expected at most {MAX_ROLES} names, each once, of 1 to 32 letters, "
                "digits, _ and -"
            )
        if self.roles and self.weights:
            raise ValueError("agent.weights weighs components of one reward, and agent.roles have a reward each: remove one")
        wrong = [name for name, weight in self.weights.items() if not math.isfinite(weight)]
        if wrong:
            raise ValueError(f"agent.weights.{wrong[0]} is {self.weights[wrong[0]]}: expected a finite number")
        return self

    @property
    def is_used(self) -> bool:
        """Whether agents solve the episodes of this run."""
        return bool(self.function or self.command or self.url)
