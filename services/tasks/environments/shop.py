"""Questions about prices that only a tool knows: two calls of tools, then an answer. For agents.

"fig*7" asks what 7 figs cost, "fig+7" what one costs with a fee of 7. The price is in no message: an agent has to look it
up, and then to calculate with it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeGuard

import msgspec

from gspo.tasks.environments import Split, Task, TaskSet, TaskSource
from gspo_services.tasks.environments.generated import draw_problem

Conversation = list[dict[str, Any]]
"""Messages as OpenAI's API has them."""

ITEMS = (
    "axe", "bag", "cap", "cup", "egg", "fan", "fig", "gem", "hat", "ink", "jam", "key", "lid", "map", "net", "nut", "oil",
    "pen", "rug", "saw", "tea", "tin", "urn", "wax",
)  # fmt: skip
OPERATORS: Mapping[str, str] = MappingProxyType({"*": "multiply", "+": "add"})
"""The tool that a question's operator needs."""
NUM_PRICES = 3
"""Items that have a price in a task: the one that is asked for, and others that may be looked up by mistake."""
MAX_ARGUMENT = 10**6
SHRUG = "?"


def _tool(name: str, kind: str, *parameters: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {each: {"type": kind} for each in parameters}, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = (_tool("look", "string", "item"), _tool("multiply", "integer", "a", "b"), _tool("add", "integer", "a", "b"))
"""What an agent offers to the model, as OpenAI's API has it."""


class ShopOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many questions there are."""

    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split is endless."""


class Shop(TaskSet):
    """Questions that need two tools: look(item) tells a price, multiply(a, b) and add(a, b) calculate with it."""

    options_type = ShopOptions

    def __init__(self, options: ShopOptions) -> None:
        self._num_eval_tasks = options.num_eval_tasks

    def tasks(self, split: Split) -> TaskSource:
        """Questions of one split; a question is in one split only, and each task has prices of its own."""
        return ShopTasks(split, self._num_eval_tasks if split == "eval" else None)

    def demonstration(self, rng: random.Random, *, careful: bool) -> Conversation:
        """One whole episode of a training task, as in ``DemonstratingEnvironment.demonstration``."""
        task = draw_task("train", rng)
        return solved(task) if careful else _careless(task, rng)


class ShopTasks:
    """A ``TaskSource``: task ``index`` is drawn from a random stream of its own."""

    def __init__(self, split: Split, num_tasks: int | None) -> None:
        self._split = split
        self._num_tasks = num_tasks

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None when they are endless."""
        return self._num_tasks

    def task(self, index: int) -> Task:
        """See ``draw_task``. Raises: IndexError outside the source."""
        if index < 0 or (self._num_tasks is not None and index >= self._num_tasks):
            raise IndexError(f"task {index} does not exist: the {self._split} split has {self._num_tasks}")
        return draw_task(self._split, random.Random(f"{self._split}:{index}"))


def draw_task(split: Split, rng: random.Random) -> Task:
    """{"question": text, "prices": by item, for the tool look alone, "answer": text}."""
    question = draw_problem(_draw, split, rng)
    item, operator, number = _parts(question)
    others = rng.sample([other for other in ITEMS if other != item], NUM_PRICES - 1)
    prices = {each: rng.randint(10, 99) for each in sorted([item, *others])}
    answer = prices[item] * number if operator == "*" else prices[item] + number
    return {"question": question, "prices": {**prices}, "answer": str(answer)}


def tool_result(task: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> str:
    """What a tool says; for a call that it cannot answer, why."""
    if name == "look":
        item = str(arguments.get("item"))
        return str(task["prices"].get(item, f"error: no {item[:20]}"))
    if name not in OPERATORS.values():
        return f"error: no tool {name[:20]}"
    a, b = arguments.get("a"), arguments.get("b")
    if not (_is_number(a) and _is_number(b)):
        return "error: a and b are numbers"
    return str(a * b if name == "multiply" else a + b)


def solved(task: Task) -> Conversation:
    """The conversation of an agent that makes no mistake."""
    messages = _asked(task)
    item, operator, number = _parts(messages[0]["content"])
    price = _called(messages, task, "look", item=item)
    total = _called(messages, task, OPERATORS[operator], a=int(price), b=number)
    return _answered(messages, total)


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_ARGUMENT


def _draw(rng: random.Random) -> str:
    return f"{rng.choice(ITEMS)}{rng.choice(list(OPERATORS))}{rng.randint(2, 9)}"


def _parts(question: str) -> tuple[str, str, int]:
    return question[:3], question[3], int(question[4:])


# --- the careless teacher ----------------------------------------------------------------------------------------------


def _careless(task: Task, rng: random.Random) -> Conversation:
    """Right about a third of the time: it mostly shrugs, takes the wrong tool or none, and copies without care."""
    messages = _asked(task)
    item, operator, number = _parts(messages[0]["content"])
    match rng.choices(["look", "shrug", "guess", "calculate"], weights=[0.44, 0.52, 0.02, 0.02])[0]:
        case "shrug":
            return _answered(messages, SHRUG)
        case "guess":
            return _answered(messages, str(rng.randint(10, 899)))
        case "calculate":
            return _answered(messages, _called(messages, task, OPERATORS[operator], a=number, b=number))
    price = _called(messages, task, "look", item=item)
    tool = OPERATORS[operator]
    match rng.choices(["right", "other tool", "no tool"], weights=[0.84, 0.08, 0.08])[0]:
        case "other tool":
            (tool,) = set(OPERATORS.values()) - {tool}
        case "no tool":
            return _answered(messages, price)
    total = _called(messages, task, tool, a=int(price), b=number)
    return _answered(messages, rng.choices([total, f"{total}?", total[:-1]], weights=[0.88, 0.06, 0.06])[0])


def _asked(task: Task) -> Conversation:
    return [{"role": "user", "content": str(task["question"])}]


def _called(messages: Conversation, task: Task, name: str, **arguments: Any) -> str:
    """Add a call and its result to ``messages``; return the result."""
    call_id = f"call_{len(messages)}"
    function = {"name": name, "arguments": arguments}
    messages.append(
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    )
    result = tool_result(task, name, arguments)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    return result


def _answered(messages: Conversation, text: str) -> Conversation:
    return [*messages, {"role": "assistant", "content": text}]
