"""YAML as plain values: what kubectl's users write, and nothing that YAML could be abused for."""

import itertools
import math
import re
import string
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.kube import yaml as yaml_documents
from kproxy_core.kube.yaml import MAX_ALIASED, MAX_DEPTH, NotYaml, Unfinished


def documents(data: bytes) -> list[Any]:
    return [value for value in yaml_documents.documents(data) if value is not Unfinished]


@pytest.mark.parametrize(("text", "value"), [
    ("80", 80), ("-1", -1), ("+5", 5), ("0", 0), ("010", 8), ("0o17", 15), ("0x1F", 31), ("08", 8.0),
    ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), (".inf", math.inf), ("-.INF", -math.inf),
    ("9" * 40, 1e40), ("9" * 5000, math.inf),
    ("true", True), ("True", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
    ("yes", "yes"), ("on", "on"), ("No", "No"), ("y", "y"), ("2026-01-01", "2026-01-01"),
    ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z"), ("12:30:45", "12:30:45"), ("1_000", "1_000"),
    ("10.96.0.1", "10.96.0.1"), ("fd00::1", "fd00::1"), ("1.2.3", "1.2.3"),
    ("'80'", "80"), ('"true"', "true"), ("''", ""), ('"a\\n\\u00e9"', "a\né"), ("|\n  a\n  b\n", "a\nb\n"),
    ("!!str 80", "80"), ("! 80", "80"), ("!!int '80'", 80), ("!!null ''", None),
    ("+", "+"), (".", "."), ("0x", "0x"), ("--", "--"),
])
def test_scalars(text: str, value: object) -> None:
    ((found,),) = documents(f"- {text}".encode())
    assert (found, type(found)) == (value, type(value))


def test_not_a_number_is_a_float() -> None:
    (found,) = documents(b"[.nan, .NaN]")
    assert all(math.isnan(value) for value in found)


@pytest.mark.parametrize(("text", "values"), [
    ("", []), ("# only a comment\n", []), ("---\n", [None]), ("---\n---\n...\n", [None, None]),
    ("a: 1\n---\nb: 2\n", [{"a": 1}, {"b": 2}]), ("[1, [2, {a: [3]}]]", [[1, [2, {"a": [3]}]]]),
    ("{a: 1, b: {c: d}}", [{"a": 1, "b": {"c": "d"}}]),
    ("1: a\ntrue: b\nnull: c\n", [{"1": "a", "true": "b", "null": "c"}]),
    ("a: &x [1]\nb: *x\n", [{"a": [1], "b": [1]}]), ("a: &x 5\nb: *x", [{"a": 5, "b": 5}]),
    ("&k a: *k", [{"a": "a"}]), ("a: 1\na: 2", [{"a": 2}]),
    ("base: &b {x: 1, y: 2}\nmore:\n  y: 3\n  <<: *b\n  z: 4\n",
     [{"base": {"x": 1, "y": 2}, "more": {"y": 3, "x": 1, "z": 4}}]),
    ("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}",
     [{"a": {"x": 1}, "b": {"x": 2, "y": 2}, "c": {"x": 1, "y": 2}}]),
    ("\ufeffa: 1", [{"a": 1}]), ("a:\r\n- b\r\n", [{"a": ["b"]}]),
])
def test_documents(text: str, values: list[object]) -> None:
    assert documents(text.encode()) == values


def test_utf_16() -> None:
    assert documents("a: é".encode("utf-16")) == [{"a": "é"}]


@pytest.mark.parametrize("text", [
    b"a: [1", b"{a", b"a: b: c", b"\ta: 1", b"'", b"@", b"`", b"%YAML 9.0\n---\na",
    b"a: *nobody", b"&x [*x]", b"&x {a: *x}", b"? [a]\n: b", b"? {a: b}\n", b"<<: 5", b"<<: [5]",
    b"!!python/object/apply:os.system [id]", b"!!python/name:os.system x", b"!!binary aGVsbG8=", b"!!set {a}",
    b"!!timestamp 2026-01-01", b"!mine {a: b}",
    b"a\x00b", b"a: \x07", b"\xff\xfe\x00", b"\x80", b"a: \xc3", b'"\\ud800"', b'"\\x"',
    b"\x7fELF\x02\x01\x00",
], ids=repr)
def test_refused(text: bytes) -> None:
    with pytest.raises(NotYaml) as caught:
        documents(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("opening", [b"[", b"{a: ", b"- ", b"? "])
def test_nesting_is_limited(opening: bytes) -> None:
    with pytest.raises(NotYaml, match="nested too deeply"):
        documents(opening * 100_000)


def test_nesting_up_to_the_limit_is_fine() -> None:
    (found,) = documents(b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1))
    assert isinstance(found, list)


def test_an_alias_bomb_is_refused() -> None:
    letters = string.ascii_lowercase[:9]
    bomb = "a: &a [lol]\n" + "".join(
        f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, this in itertools.pairwise(letters))
    with pytest.raises(NotYaml, match="aliases stand for more than"):
        documents(bomb.encode())


def test_a_merge_key_bomb_is_refused() -> None:
    wide = ", ".join(f"k{i}: v" for i in range(100))
    with pytest.raises(NotYaml, match="aliases stand for more than"):
        documents(f"a: &a {{{wide}}}\nb: {{<<: [{', '.join(['*a'] * 1000)}]}}".encode())


def test_aliases_up_to_the_limit_are_fine() -> None:
    (found,) = documents(f"- &x [{', '.join('1' * 98)}]\n".encode() + b"- *x\n" * (MAX_ALIASED // 100))
    assert len(found) == MAX_ALIASED // 100 + 1


def test_the_size_of_a_document_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1_000
    monkeypatch.setattr(yaml_documents, "MAX_NODES", most)
    with pytest.raises(NotYaml, match="more than"):
        documents(b"[" + b"1," * most + b"]")
    half = b"[" + b"1," * (most * 3 // 4) + b"]\n"
    assert len(documents(half + b"---\n" + half)) == 2


def test_anchors_end_with_their_document() -> None:
    with pytest.raises(NotYaml):
        documents(b"&x 1\n---\n*x\n")


# Text like 0E0 is a number in YAML 1.2, which we and kubectl read; PyYAML, of YAML 1.1, does not quote it.
TEXT = st.text(string.printable, max_size=12).filter(
    lambda text: not re.fullmatch(r"[-+]?[0-9]+[eE][-+]?[0-9]+", text))
PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | TEXT,
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(string.ascii_letters), inner, max_size=4))


@given(PLAIN_VALUES)
def test_the_output_of_another_yaml_writer_is_read_back(value: object) -> None:
    assert documents(yaml.safe_dump(value).encode()) == [value]


@given(PLAIN_VALUES)
def test_json_is_yaml(value: object) -> None:
    assert documents(msgspec.json.encode(value)) == [value]


@given(st.text("{}[]:,&*!|>'\"%#-? \n\tab1.<\\", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(NotYaml):
        read = documents(text.encode())
        assert msgspec.json.decode(msgspec.json.encode(read)) == read
