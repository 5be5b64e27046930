"""Log lines: one per event, readable by people and machines, whatever their values."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_core.observe.logs import set_up, set_verbosity


@pytest.fixture(autouse=True)
def _logging_is_restored() -> Iterator[None]:
    root = logging.getLogger("kproxy")
    before = root.handlers, root.propagate, root.level, logging.raiseExceptions, logging.logMultiprocessing
    yield
    root.handlers, root.propagate, root.level, logging.raiseExceptions, logging.logMultiprocessing = before


def logged(
    message: str,
    fields: dict[str, object],
    *,
    form: Literal["text", "json"] = "text",
    level: int = logging.INFO,
    verbosity: int = 0,
) -> str:
    stream = io.StringIO()
    set_up(verbosity, form, stream)
    logging.getLogger("kproxy.sources").log(level, message, extra={"fields": fields})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"took": 0.123456789, "count": 3, "ok": True}, " took=0.123457 count=3 ok=True"),
        ({"service": "default/web:http", "empty": ""}, ' service=default/web:http empty=""'),
        (
            {"a": "two words", "b": 'q"uote', "c": "k=v", "d": "back\\slash", "e": "it's"},
            r' a="two words" b="q\"uote" c="k=v" d="back\\slash" e="it' "'" r's"',
        ),
        (
            {"a": "new\n line", "b": "\x1b[31m", "c": "\u2028", "d": "\u202e", "e": "\udc80", "f": "Zürich"},
            r' a="new; line" b="\x1b[31m" c="\u2028" d="\u202e" e="\udc80" f=Zürich',
        ),
    ],
)
def test_fields_are_quoted_when_needed(fields: dict[str, object], text: str) -> None:
    line = logged("something happened", fields)
    assert (
        re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line)
        == f"INFO sources: something happened{text}\n"
    )


def test_a_very_long_value_is_cut() -> None:
    assert len(logged("x", {"a": "b" * 1_000_000})) < 5_000


def test_json() -> None:
    line = logged("a\nb", {"n": 1, "s": "x y", "msg": "not mine", "o": b"x"}, form="json")
    document = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document.pop("ts"))
    assert document == {"level": "INFO", "room": "sources", "msg": "a\nb", "n": 1, "s": "x y", "o": "b'x'"}
    assert line.count("\n") == 1


@given(st.text(), st.text(), st.sampled_from(["text", "json"]))
def test_an_event_is_one_line_of_encodable_text(
    message: str, value: str, form: Literal["text", "json"]
) -> None:
    line = logged(message.replace("%", "%%"), {"value": value}, form=form)
    assert line.encode().endswith(b"\n")
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [
        (0, [20, 30, 40]),
        (1, [20, 30, 40]),
        (2, [10, 20, 30, 40]),
        (4, [8, 10, 20, 30, 40]),
        (99, [1, 8, 10, 20, 30, 40]),
    ],
)
def test_verbosity(verbosity: int, shown: list[int]) -> None:
    assert [
        level for level in (1, 8, 10, 20, 30, 40) if logged("x", {}, level=level, verbosity=verbosity)
    ] == shown


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_is_in_the_same_line(form: Literal["text", "json"]) -> None:
    stream = io.StringIO()
    set_up(0, form, stream)
    try:
        raise ValueError("why\nnot")
    except ValueError:
        logging.getLogger("kproxy.run").exception("it broke")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: why" in stream.getvalue()


def raised(verbosity: int) -> str:
    """Return the line about an exception of two lines with a cause."""
    stream = io.StringIO()
    set_up(verbosity, "text", stream)
    try:
        try:
            raise KeyError("x")
        except KeyError as cause:
            raise ValueError("why\n  not") from cause
    except ValueError:
        logging.getLogger("kproxy.run").exception("it broke:\nwholly")
    return stream.getvalue()


def test_an_exception_is_readable_with_the_calls_that_led_to_it() -> None:
    here = r"raised test_logs\.py:\d+"
    assert re.search(
        r"ERROR run: it broke:; wholly "
        rf'traceback="ValueError: why; not: {here}; because of KeyError: \'x\': {here}"\n$',
        raised(verbosity=0))
    full = rf"raised {re.escape(__file__)}:\d+"
    assert re.search(
        rf'"ValueError: why; not: {full}; because of KeyError: \'x\': {full}"\n$', raised(verbosity=2))


def test_many_calls_are_shown_where_v_asks_for_them() -> None:
    def down(steps: int) -> None:
        if not steps:
            raise ValueError("deep")
        down(steps - 1)

    for verbosity, calls in ((0, 6), (2, 22)):
        stream = io.StringIO()
        set_up(verbosity, "text", stream)
        try:
            down(20)
        except ValueError:
            logging.getLogger("kproxy.run").exception("it broke")
        assert stream.getvalue().count("test_logs.py:") == calls


def test_setting_up_again_replaces() -> None:
    old = io.StringIO()
    set_up(0, "text", old)
    logged("x", {})
    assert old.getvalue() == ""


def test_a_closed_stream_does_not_stop_the_process() -> None:
    stream = io.StringIO()
    set_up(0, "text", stream)
    stream.close()
    logging.getLogger("kproxy.run").info("into the void")
    assert stream.closed


def test_another_verbosity_takes_effect_at_once() -> None:
    stream = io.StringIO()
    set_up(0, "text", stream)
    log = logging.getLogger("kproxy.run")
    log.debug("unheard")
    set_verbosity(4)
    log.debug("heard")
    set_verbosity(0)
    log.debug("unheard again")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["heard"]


UNREAD = """
import logging
from kproxy_core.observe.logs import set_up
set_up(0, "text")
for number in range(20_000): logging.getLogger("kproxy.run").info("%0100d", number)
print("all logged", flush=True)
input()
logging.getLogger("kproxy.run").info("the end")
"""


def test_nothing_waits_for_the_reader_of_standard_error_and_lost_lines_are_counted() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "all logged\n"
        read = [process.stderr.readline()]
        while "were lost" not in read[-1]:
            read.append(process.stderr.readline())
        lost = int(read.pop().rpartition("lines=")[2])
        assert lost > 0
        assert [int(line.split()[-1]) for line in read] == list(range(20_000 - lost))
        assert process.communicate("\n")[1].endswith("INFO run: the end\n")
