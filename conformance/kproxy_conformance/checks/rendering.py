"""A plugin in a child process: its imports, and its rendering without privileges.

``python -m kproxy_conformance.checks.rendering`` is that process; it reads its task as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from kproxy_conformance.checks.check import Failed
from kproxy_conformance.checks.subject import Subject, Wanted

HEAVY = frozenset({
    "asyncio", "bcc", "hypothesis", "kubernetes", "nftables", "prometheus_client", "pyroute2",
    "pytest", "yaml",
})  # fmt: skip
"""Modules that cost more than 10 ms or 5 MiB."""


def in_another_process(wanted: Wanted, what: str, environment: Mapping[str, str]) -> str:
    """Return the text for a family, by its label, or with ``imports`` the modules. Raises Failed."""
    question = {
        "what": what, "mode": wanted.mode, "plugins": wanted.plugins, "options": dict(wanted.options),
        "path": sys.path,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(question), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise Failed(f"in a process of its own, without privileges: {last[0]}")
    return done.stdout


def _answer(question: Mapping[str, object]) -> str:
    from kproxy_conformance.checks.features import everything
    from kproxy_conformance.checks.privileges import without_privileges
    from kproxy_conformance.checks.subject import render
    from kproxy_core.model.address import Family

    plugins, options = question["plugins"], question["options"]
    assert isinstance(plugins, list)
    assert isinstance(options, dict)
    wanted = Wanted(str(question["mode"]), tuple(plugins), options)
    before = set(sys.modules)
    subject = Subject(wanted)
    subject.registry.load(wanted.mode)
    if question["what"] == "imports":
        return "\n".join(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    family = Family(str(question["what"]))
    with without_privileges():
        instance = subject.start()
        text = render(instance, family, everything(family))
        subject.end(instance)
    return text


if __name__ == "__main__":
    sys.stdout.write(_answer(json.load(sys.stdin)))
