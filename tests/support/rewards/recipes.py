"""Strategies of hypothesis for recipes of ``anything``: what user code may return and raise."""

from typing import Any

from hypothesis import strategies as st

from tests.support.rewards.anything import BASES, ERRORS, METHODS, VALUES

_named = st.one_of(
    st.sampled_from(sorted(VALUES)).map(lambda name: {"return": name}),
    st.sampled_from(sorted(ERRORS)).map(lambda name: {"raise": name}),
)


def _methods(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(METHODS), inner, min_size=1, max_size=4)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    liar = st.fixed_dictionaries({"base": st.sampled_from(sorted(BASES)), "methods": _methods(inner)})
    error = st.fixed_dictionaries({"methods": _methods(inner)})
    return st.one_of(liar.map(lambda value: {"return": value}), error.map(lambda value: {"raise": value}))


recipes: st.SearchStrategy[dict[str, Any]] = st.recursive(_named, _objects, max_leaves=6)
"""Each is plain data."""
bodies: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=64),
    st.sampled_from([
        b"", b"1", b"1e999", b"-1e308", b"NaN", b"Infinity", b'"1"', b"null", b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000,
        b'{"reward": 1e400}', b'{"reward": {"a": 1e308, "b": 1e308}}', b'{"reward": {"\\ud800": 1}}', b'{"reward": 0.5}',
        b'{"reward": {"a": true}}', b"\xff\xfe1\x00", b'{"a": 1, "a": 2}', b"1" + b" " * 70_000,
    ]),
)  # fmt: skip
"""What a service or a program says."""
outputs: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=64),
    st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([
        b"99e999999", b"-1e-999999", b"9" * 5000, b"1e1000000", b"NaN", b"Infinity", b"sNaN", b"1.5", b"1.50", b"0x1p3",
        b"[" * 50_000, b"1" * 400, b"1e400", b"[1e400, -1e400]", b"null", "\u0661\u0662".encode(), b"1_0", b"\x00",
        b"[[[[[[1]]]]]]", b'{"1.5": 1.5}', b"true",
    ]),
)  # fmt: skip
"""What a policy's program prints."""
