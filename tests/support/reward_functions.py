"""Reward functions that misbehave, each in its own way. Reward workers import them by name."""

import os
import sys
import time


def length(text: str) -> float:
    sys.stdout.write("reward code prints what it likes\n")
    sys.stdout.flush()
    return float(len(text))


def process_id() -> int:
    return os.getpid()


def hang() -> float:
    while True:
        time.sleep(3600)


def burn() -> float:
    while True:
        pass


def crash() -> float:
    os._exit(3)


def allocate(num_bytes: int) -> float:
    return float(len(bytearray(num_bytes)))


def refuse(text: str) -> float:
    raise KeyError(text)


def not_a_number() -> float:
    return float("nan")


def infinite() -> float:
    return float("inf")


def words() -> str:
    return "one"


def leave() -> float:
    sys.exit(1)
