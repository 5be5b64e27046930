"""Structured logging: one line per event, to standard error.

Rooms log with ``logging.getLogger("kproxy.<room>")`` and put values into ``extra={"fields": {...}}``.
Verbosity counts as in Kubernetes: 0 shows INFO and above, 2 also DEBUG, and n > 2 also level ``12 - n``.
`QUIET` shows warnings and above.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any, Literal, TextIO

QUIET = -1

_ROOT = "kproxy"
_STANDARD_ERROR = 2
_LONGEST_VALUE = 4000
_CALLS = 6
_KEPT = 300
"""Number of lines kept for a report."""
_MOST_UNWRITTEN = 1 << 20
"""Limit in bytes for lines that standard error does not take."""
_FLUSH_SECONDS = 1.0
"""Time limit for writing the last lines when the process ends."""
_PLAIN = re.compile(r"""[^\s"'=\\]+""")


def set_up(verbosity: int, form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send all logs to *stream* as ``text`` or ``json``. Replaces earlier calls.

    None: to standard error, from a thread, so that nothing waits for whoever reads it.
    """
    logging.raiseExceptions = False  # a closed standard error must not fail the process
    logging.logMultiprocessing = False
    handler = _Background() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger(_ROOT)
    root.handlers = [handler, _recent]
    root.propagate = False
    set_verbosity(verbosity)


def set_verbosity(verbosity: int) -> None:
    level = logging.WARNING if verbosity == QUIET else logging.INFO
    logging.getLogger(_ROOT).setLevel(level if verbosity < 2 else max(1, 12 - verbosity))


def log_uncaught() -> None:
    """Log exceptions that end the process or a thread, and those of destructors, instead of printing them.

    Escapes their text, which may be a plugin's.
    """

    def caught(message: str, error: BaseException | None, fields: dict[str, object]) -> None:
        if error is not None and not isinstance(error, SystemExit):
            logging.getLogger("kproxy.run").critical(message, exc_info=error, extra={"fields": fields})

    sys.excepthook = lambda kind, error, traceback: caught("unexpected exception", error, {})
    threading.excepthook = lambda given: caught(
        "unexpected exception in a thread", given.exc_value,
        {"thread": given.thread.name if given.thread is not None else ""})
    sys.unraisablehook = lambda given: caught("exception ignored", given.exc_value, {})


def recent_lines() -> list[str]:
    """Return the last lines of the log, as text, for a report."""
    formatter = _TextFormatter()
    return [formatter.format(record) for record in list(_recent.records)]


def stacks() -> str:
    """Return the stack of each thread, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {ident} [{names.get(ident, 'unknown')}]:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def innermost_calls() -> str:
    """Return the innermost calls of each thread, short enough for a value in the log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = (
        (names.get(ident, "unknown"), traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_CALLS, lookup_lines=False))
        for ident, frame in sys._current_frames().items()
    )
    return "; ".join(f"{name}: {' < '.join(map(_place, calls))}" for name, calls in threads)


def one_line_traceback(error: BaseException, *, is_full: bool) -> str:
    """Return *error* and its causes with the calls that led to each, the innermost first.

    Unless *is_full*, with the last few calls only, and files without their directories.
    """
    parts = []
    told: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in told:
        told.add(id(cause))
        calls = traceback.extract_tb(cause.__traceback__, limit=None if is_full else -_CALLS)
        what = "".join(traceback.format_exception_only(cause)).strip()
        places = " < ".join(_place(call, is_full=is_full) for call in reversed(calls))
        parts.append(f"{_joined(what)}: {places}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "; because of ".join(parts)


def _joined(text: str) -> str:
    """Return the lines of *text* in one line."""
    return "; ".join(filter(None, map(str.strip, text.splitlines()))) if "\n" in text else text


def _place(call: traceback.FrameSummary, *, is_full: bool = False) -> str:
    return f"{call.name} {call.filename if is_full else os.path.basename(call.filename)}:{call.lineno}"


class _Background(logging.Handler):
    """Writes to standard error from a thread. Lines beyond `_MOST_UNWRITTEN` are lost, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = bytearray()
        self._lost = 0
        self._is_writing = False
        self._changed = threading.Condition()
        """Guards the three."""
        # The thread inherits the mask: signals of the process are for those that handle or await them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._run, name="kproxy-log", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - an argument of the caller, who must go on
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) + len(line) > _MOST_UNWRITTEN:
                self._lost += 1
                return
            self._lines += line
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._is_writing), _FLUSH_SECONDS)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                data, self._lines, self._is_writing = bytes(self._lines), bytearray(), True
                if self._lost:
                    data += self._line(logging.makeLogRecord({
                        "name": "kproxy.run", "levelno": logging.WARNING, "levelname": "WARNING",
                        "msg": "log lines were lost: standard error was not read in time",
                        "fields": {"lines": self._lost}}))
                    self._lost = 0
            with contextlib.suppress(OSError):  # a closed standard error must not fail the process
                while data:
                    data = data[os.write(_STANDARD_ERROR, data):]


class _Recent(logging.Handler):
    """Keeps the last records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


_recent = _Recent()


class _TextFormatter(logging.Formatter):
    """``time level room: message key=value``"""

    def format(self, record: logging.LogRecord) -> str:
        message = printable(_joined(record.getMessage()))
        line = f"{_time(record)} {record.levelname} {_room(record)}: {message}"
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1]:
            is_full = logging.getLogger(_ROOT).isEnabledFor(logging.DEBUG)
            fields["traceback"] = one_line_traceback(record.exc_info[1], is_full=is_full)
        return " ".join((line, *(f"{key}={_quoted(value)}" for key, value in fields.items())))


class _JsonFormatter(logging.Formatter):
    """One object: ts, level, room, msg, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        import json  # loaded for this format only

        head = {"ts": _time(record), "level": record.levelname, "room": _room(record),
                "msg": record.getMessage()}
        fields = {name: value for name, value in getattr(record, "fields", {}).items() if name not in head}
        if record.exc_info and record.exc_info[1]:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(head | fields, default=str)


def _time(record: logging.LogRecord) -> str:
    """Format the time of *record* as RFC 3339 in UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _room(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_ROOT}.")


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else _joined(str(value))
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "..."
    if text.isprintable() and _PLAIN.fullmatch(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(text)}"'


def printable(text: str) -> str:
    """Return *text* with everything escaped that ends a line, moves a cursor or cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_json(value: Any) -> Any:
    """Return *value*, as JSON has it, with printable texts and keys."""
    match value:
        case str():
            return printable(value)
        case list():
            return [printable_json(item) for item in value]
        case dict():
            return {printable(key): printable_json(item) for key, item in value.items()}
    return value
