"""A harness for verifiers: the policy and the task's tools converse in this process.

verifiers starts a program for every rollout, which imports all packages: a second of processor time for an episode of a
few tokens. Its contract allows a harness to run in the process as long as every call goes through the interception server.
"""

import contextlib
import json
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

HTTP = openai.DefaultAsyncHttpxClient()
"""One for all episodes of a worker: making one takes longer than a call."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Does the same as verifiers' ``null`` harness: calls until an answer has no tool calls, or the context is full."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Converse to the end. Raises: openai.APIError when a call is refused for another reason than its length."""
        system_prompt, prompt = self.resolve_prompt(data)
        messages: Any = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        policy = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, http_client=HTTP)
        async with contextlib.AsyncExitStack() as stack:
            schemas, *connection = await connect_mcp({"mcpServers": servers}, stack)
            offer = {"tools": schemas} if schemas else {}
            while True:
                try:
                    answer = await policy.chat.completions.create(model=ctx.model, messages=messages, **offer)
                except openai.APIStatusError as error:
                    if not is_context_overflow(error):
                        raise
                    break  # The conversation so far is scored: the policy itself ran out of tokens.
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = await _result(call.function.name, call.function.arguments, *connection)
                    messages.append(bound_tool_message({"role": "tool", "tool_call_id": call.id, "content": content}))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(name: str, arguments: str, places: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    """Return a tool's result, or the reason why it was not called; the policy reads either."""
    if name not in places:
        return f"error: unknown tool {name!r}"
    try:
        values = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    return await call_mcp(servers, places, name, values)
