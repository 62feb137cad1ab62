"""Structured changes of inputs: a valid input with one error gets further than random bytes."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

import msgpack

FRAME_MARK: Final = b"\xc1\xc1"
"""Separates the frames of a message: msgpack never uses 0xc1."""
Path = tuple[Any, ...]
ODD_NUMBERS: Final = (-1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, 1e300, -0.0)
ODD_FLOATS: Final = (float("nan"), float("inf"), float("-inf"))
ODD_TEXTS: Final = ("", " ", "\0", "\n", "x" * 200, "é", "\U0001f600", "train", "..", "/", "1", "-1", "1e999", "[", "nan")


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, cut, double, insert or overwrite bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.choice((1, 2, 8, 64))]
            case 2:
                out[at:at] = out[at : at + rng.choice((1, 4, 32))]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case _:
                out[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, 10, 34, 48))])
    return bytes(out)


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """Change, double, drop or swap lines."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines.insert(at, rng.choice(lines))
        case 1:
            del lines[at]
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = mutate_bytes(lines[at], rng)
    return b"\n".join(lines)


def mutate_json(data: bytes, rng: Random) -> bytes:
    """Change the value when the input is JSON, else its bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    try:
        plain = json.loads(data)
        return json.dumps(mutate_plain(plain, rng)).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)


def mutate_json_lines(data: bytes, rng: Random) -> bytes:
    """Change the JSON value in one line, or the lines."""
    lines = data.split(b"\n")
    if rng.random() < 0.3:
        return mutate_lines(data, rng)
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng)
    return b"\n".join(lines)


def mutate_frames(data: bytes, rng: Random) -> bytes:
    """Change a message's header, or its frames."""
    frames = data.split(FRAME_MARK)
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    if rng.random() < 0.2:
        at = rng.randrange(len(frames))
        frames[at] = mutate_bytes(frames[at], rng)
        return FRAME_MARK.join(frames)
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        frames[0] = msgpack.packb(mutate_plain(header, rng, binary=True))
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException):
        return mutate_bytes(data, rng)
    return FRAME_MARK.join(frames)


def mutate_plain(plain: Any, rng: Random, *, binary: bool = False) -> Any:
    """``plain`` with one node replaced, removed, doubled or renamed."""
    places = list(_places(plain, ()))
    path = rng.choice(places)
    return _changed(plain, path, lambda node: _other(node, rng, binary))


def _places(node: Any, path: Path) -> Iterator[Path]:
    yield path
    if len(path) > 20:
        return
    if isinstance(node, dict):
        for key in node:
            yield from _places(node[key], (*path, key))
    elif isinstance(node, list):
        for index in range(min(len(node), 50)):
            yield from _places(node[index], (*path, index))


def _changed(node: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(node)
    if isinstance(node, dict):
        return {key: _changed(value, path[1:], change) if key == path[0] else value for key, value in node.items()}
    return [_changed(value, path[1:], change) if index == path[0] else value for index, value in enumerate(node)]


def _other(node: Any, rng: Random, binary: bool) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.6:
        key = rng.choice(list(node))
        rest = {other: value for other, value in node.items() if other != key}
        return rng.choice((rest, {**rest, f"{key}x": node[key]}, {**node, "added": 1}))
    if isinstance(node, list) and node and rng.random() < 0.6:
        at = rng.randrange(len(node))
        return rng.choice((node[:at] + node[at + 1 :], [*node, node[at]], node[::-1], node * 2))
    if isinstance(node, int | float) and not isinstance(node, bool) and rng.random() < 0.5:
        return node + rng.choice((-1, 1))
    return _odd(rng, binary)


def _odd(rng: Random, binary: bool) -> Any:
    values: list[Any] = [None, True, rng.choice(ODD_NUMBERS), rng.choice(ODD_FLOATS), rng.choice(ODD_TEXTS), [], {}, [[]]]
    values += [{"a": 1}, nested(rng.choice((3, 40, 200, 900, 990)), rng.random() < 0.5), [0] * rng.choice((1, 3, 300))]
    if binary:
        values += [b"bytes", {b"key": 1}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)]
    return rng.choice(values)


def nested(depth: int, mapping: bool) -> Any:
    """Lists or maps, nested ``depth`` levels deep."""
    node: Any = 0
    for _ in range(depth):
        node = {"a": node} if mapping else [node]
    return node
