"""The table of completions: a run's index, sorted, filtered and searched, and the rows of one page with their texts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gspo_services.broker.store import StoreCorrupt
from gspo_services.runs.reading import OpenRun, RecordedTokens
from gspo_services.runs.view.completions.index import STATUSES, CompletionIndex, Whole
from gspo_services.runs.view.groups import source_of
from gspo_services.runs.view.queries import finite, one_of, whole_number
from gspo_services.runs.view.texts import Texts

SORTS: Final = ("reward", "length", "tokens", "turns", "lag", "version", "clipped", "task", "batch", "trajectory")
COMPONENT: Final = "component/"
MOST_ROWS: Final = 200
DEFAULT_ROWS: Final = 50
MOST_TEXT: Final = 500
EXCERPT: Final = 320
"""Characters of a prompt or an answer in the table."""
EXCERPT_TOKENS: Final = 400
"""Tokens from either end that an excerpt is made of: a long text is not decoded as a whole."""
READ_S: Final = 0.2
"""Seconds of one answer for reading on, and for searching."""
WORDS: Final = {
    "which": ("finished", "all"), "split": ("train", "eval"), "status": STATUSES, "order": ("up", "down"),
    "cut": ("yes", "no"), "clipped": ("yes", "no"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompletionQuery:
    """Which completions are wanted, in which order."""

    sort: str
    is_down: bool
    first: int
    """The place in the order to begin at."""
    most: int
    text: str
    """In lower case; what prompt or answer must have. Empty: anything."""
    words: tuple[tuple[str, str], ...]
    """The chosen ones of WORDS."""
    numbers: tuple[tuple[str, int], ...]
    """Values that columns must have."""
    least: float | None
    """Of the reward."""
    largest: float | None
    until: int | None
    """Trajectories from this one on are left out: pages of a run that grows stay as they were."""

    @property
    def choice(self) -> tuple[object, ...]:
        """What the order depends on."""
        return self.sort, self.is_down, self.words, self.numbers, self.least, self.largest, self.until


def read_query(query: Mapping[str, str]) -> CompletionQuery:
    """Read the words of an address. Raises: ValueError that names the value and what is possible."""
    sort = query.get("sort", "reward")
    if sort not in SORTS and not sort.startswith(COMPONENT):
        raise ValueError(f"sort is {sort[:100]!r}: one of {', '.join(SORTS)}, or {COMPONENT} and the name of one")
    words = {name: one_of(query, name, known) for name, known in WORDS.items()}
    numbers = {name: whole_number(query, name) for name in ("batch", "task", "group", "evaluation")}
    text = query.get("text", "").strip().lower()
    if len(text) > MOST_TEXT:
        raise ValueError(f"text has {len(text)} characters: at most {MOST_TEXT}")
    most = whole_number(query, "most")
    if most is not None and not 1 <= most <= MOST_ROWS:
        raise ValueError(f"most is {most}: 1 to {MOST_ROWS}")
    return CompletionQuery(
        sort=sort,
        is_down=words.pop("order") == "down",
        first=whole_number(query, "first") or 0,
        most=most or DEFAULT_ROWS,
        text=text,
        words=tuple((name, word) for name, word in words.items() if word is not None),
        numbers=tuple((name, value) for name, value in numbers.items() if value is not None),
        least=finite(query, "least"),
        largest=finite(query, "largest"),
        until=whole_number(query, "until"),
    )


class Completions:
    """The completions of one run. Its methods are called in the run's thread."""

    def __init__(self, index: CompletionIndex, texts: Texts) -> None:
        self._index = index
        self._texts = texts
        self._ordered: tuple[object, Whole] = (None, np.zeros(0, np.int64))
        """What the last order was made for, and the order: the next page needs it again."""

    def read(self, opened: OpenRun, seconds: float = READ_S) -> bool:
        """Read on for some time; returns whether all is there."""
        end = time.monotonic() + seconds
        self._index.read(opened, lambda: time.monotonic() < end)
        return self._index.is_complete

    def page(self, opened: OpenRun, query: CompletionQuery) -> dict[str, Any]:
        """Return a page of the table; before the index is whole, only how far it is. Raises: ValueError."""
        is_whole = self.read(opened)
        # The worst of a part of the run are not the worst.
        order = self.order(query) if is_whole else np.zeros(0, np.int64)
        plain: dict[str, Any] = {
            "read": self._index.number, "total": self._index.total, "damaged": self._index.damaged, "is_whole": is_whole,
            "number": len(order), "first": query.first, "components": self._index.components,
            "newest": int(self._index.column("trajectory").max(initial=-1)) + 1,
            "has_clipped": bool(np.isfinite(self._index.column("clipped")).any()),
        }  # fmt: skip
        if query.text:
            rows, following = self._searched(opened, order, query)
        else:
            rows = [self.row(opened, at) for at in order[query.first : query.first + query.most].tolist()]
            following = query.first + len(rows)
        return plain | {
            "rows": rows, "next": following if following < len(order) else None, "text_error": self._texts.error,
        }  # fmt: skip

    def order(self, query: CompletionQuery) -> Whole:
        """Return the places in the index of all completions that are like that, in order; unknown values come last.
        Raises: ValueError for an unknown component."""
        key = (self._index.revision, query.choice)
        if self._ordered[0] != key:
            self._ordered = key, self._sorted(query)
        return self._ordered[1]

    def _sorted(self, query: CompletionQuery) -> Whole:
        column, index = self._index.column, self._index
        if query.sort.startswith(COMPONENT) and query.sort.removeprefix(COMPONENT) not in index.components:
            known = ", ".join(COMPONENT + each for each in index.components) or "none"
            raise ValueError(f"sort is {query.sort[:100]!r}: the rewards read so far have these components: {known}")
        chosen: NDArray[np.bool_] = column("length") > 0
        if ("which", "all") not in query.words:
            chosen &= column("is_finished")
        for name, word in query.words:
            if name == "split":
                chosen &= column("is_eval") == (word == "eval")
            elif name == "status":
                chosen &= column("status") == STATUSES.index(word)
            elif name == "cut":
                chosen &= column("is_cut") == (word == "yes")
            elif name == "clipped":
                chosen &= column("clipped") > 0 if word == "yes" else column("clipped") == 0
        for name, value in query.numbers:
            chosen &= column(name) == value
        if query.least is not None:
            chosen &= column("reward") >= query.least
        if query.largest is not None:
            chosen &= column("reward") <= query.largest
        if query.until is not None:
            chosen &= column("trajectory") < query.until
        places = np.flatnonzero(chosen)
        values = column(query.sort)[places].astype(np.float64)
        # A batch of -1 is none.
        values[(values < 0) & (query.sort == "batch")] = np.nan
        values = -values if query.is_down else values
        trajectories = column("trajectory")[places]
        # Of one broker they are in their order already: one stable sort instead of two.
        is_ordered = bool((trajectories[1:] > trajectories[:-1]).all())
        return places[np.argsort(values, kind="stable") if is_ordered else np.lexsort((trajectories, values))]

    def _searched(self, opened: OpenRun, order: Whole, query: CompletionQuery) -> tuple[list[dict[str, Any]], int]:
        """Look through texts in order until a page is full or the time is over: rows, and where to go on."""
        end = time.monotonic() + READ_S
        rows: list[dict[str, Any]] = []
        at = query.first
        while at < len(order) and len(rows) < query.most and (at == query.first or time.monotonic() < end):
            place = int(order[at])
            at += 1
            prompt, answer, _ = self._whole_texts(opened, place)
            if query.text in prompt.lower() or query.text in answer.lower():
                rows.append(self.row(opened, place))
        return rows, at

    @property
    def components(self) -> list[str]:
        """The names of the reward's components, as far as they were read."""
        return self._index.components

    def trajectories(self, places: Whole) -> Whole:
        """Return which trajectories are at these places."""
        return self._index.column("trajectory")[places]

    def whole_rows(self, opened: OpenRun, places: Whole, trajectories: Whole, text: str) -> list[dict[str, Any]]:
        """Return the completions with whole texts; of those, the ones that have ``text``. Raises: ValueError when the run
        is another one by now."""
        if not np.array_equal(self._index.column("trajectory")[places], trajectories):
            raise ValueError("the run was put back to an earlier state meanwhile: begin again")
        rows = [self.row(opened, place, whole=True) for place in places.tolist()]
        return [row for row in rows if text in row["prompt"].lower() or text in row["answer"].lower()]

    def row(self, opened: OpenRun, place: int, *, whole: bool = False) -> dict[str, Any]:
        """Return one completion, with its texts, or excerpts of them; what is damaged is said."""
        at = {name: self._index.column(name)[place].item() for name in ("trajectory", "group", "task", "batch", "clipped")}
        evaluation = int(self._index.column("evaluation")[place])
        plain: dict[str, Any] = {
            "id": at["trajectory"], "group_id": at["group"], "task_index": at["task"],
            "batch": None if at["batch"] < 0 else at["batch"], "clipped": at["clipped"],
            "source": source_of(opened, bool(self._index.column("is_eval")[place]), evaluation),
            "group_status": STATUSES[self._index.column("status")[place]],
            "version": self._index.column("version")[place].item(), "prompt": "", "answer": "", "damage": "",
        }  # fmt: skip
        try:
            found = opened.trajectory(at["trajectory"])
        except StoreCorrupt as damage:
            return plain | {"damage": str(damage)}
        if found is not None:
            plain |= {
                "status": found.status, "finish": found.finish_reason, "reward": found.reward, "lag": found.lag,
                "components": dict(found.components), "tokens": found.num_tokens, "length": found.num_action_tokens,
                "turns": found.num_turns,
            }  # fmt: skip
        texts = self._whole_texts(opened, place) if whole else self._excerpts(opened, place)
        plain["prompt"], plain["answer"], plain["damage"] = texts
        return plain

    def _whole_texts(self, opened: OpenRun, place: int) -> tuple[str, str, str]:
        """Return prompt, answer, and what is damaged."""
        try:
            prompt, answer = _ids(opened.tokens(int(self._index.column("trajectory")[place])))
        except StoreCorrupt as damage:
            return "", "", str(damage)
        return self._texts.said(prompt), self._texts.said(answer), ""

    def prompt(self, opened: OpenRun, trajectory: int) -> str:
        """Return the end of a trajectory's prompt; empty where it is damaged."""
        try:
            return self._end_of(_ids(opened.tokens(trajectory))[0])
        except StoreCorrupt:
            return ""

    def _excerpts(self, opened: OpenRun, place: int) -> tuple[str, str, str]:
        """Return the end of the prompt, both ends of the answer, and what is damaged."""
        try:
            prompt, answer = _ids(opened.tokens(int(self._index.column("trajectory")[place])))
        except StoreCorrupt as damage:
            return "", "", str(damage)
        is_long = len(answer) > 2 * EXCERPT_TOKENS
        parts = (answer[:EXCERPT_TOKENS], answer[-EXCERPT_TOKENS:]) if is_long else (answer, [])
        begin, end = map(self._texts.said, parts)
        if is_long or len(begin) > EXCERPT:
            begin = f"{begin[: EXCERPT // 2]} … {(end or begin)[-EXCERPT // 2 :]}"
        return self._end_of(prompt), begin, ""

    def _end_of(self, prompt: list[int]) -> str:
        text = self._texts.said(prompt[-EXCERPT_TOKENS:])
        return f"… {text[-EXCERPT:]}" if len(text) > EXCERPT or len(prompt) > EXCERPT_TOKENS else text


def _ids(tokens: RecordedTokens) -> tuple[list[int], list[int]]:
    """Return the tokens before the policy's first, and the policy's own."""
    actions = np.flatnonzero(tokens.is_action_T)
    begin = int(actions[0]) if len(actions) else tokens.num_tokens
    return tokens.token_ids_T[:begin].tolist(), tokens.token_ids_T[actions].tolist()
