"""The player: performs the steps of one scenario in one mode and family."""

import collections
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import yaml

from kproxy_conformance.drivers.driver import Driver, DriverError, Rejected, Unavailable
from kproxy_conformance.network import dialing
from kproxy_conformance.network.addresses import expand, resolve
from kproxy_conformance.network.namespaces import Namespace
from kproxy_conformance.network.patience import patience
from kproxy_conformance.network.topology import Topology
from kproxy_conformance.suite import objects
from kproxy_conformance.suite.barrier import Barrier
from kproxy_conformance.suite.evidence import ruleset
from kproxy_conformance.suite.expectation import Attempts, Expectation, Remembered
from kproxy_conformance.suite.explained import contradictions
from kproxy_conformance.suite.objects import Json, Key
from kproxy_conformance.suite.scenario import Scenario, Step
from kproxy_core.contract.values import Leftovers

DEADLINE = 10.0
"""Seconds until an expectation must have come true, multiplied by `patience`."""
SILENT = 0.4
"""Seconds without an answer after which an attempt counts as dropped, where no answer is expected. Where
silence is, they all pass each time, and are not multiplied by `patience`."""
RETIRED_WITHIN = 20.0
"""Seconds until a mode has noticed that connections were reset, multiplied by `patience`."""
GIVEN_UP = 66.0
"""Seconds that are added to these. The barrier and `open` give up attempts that take too long. IPVS expects
the rest of a handshake for a minute, and a timer of a minute may be 5 s late at 100 Hz."""
_UNANSWERED = "the relay worker has not answered yet"
_AT_ONCE = 16
"""Concurrent attempts if none may be answered."""


class Failure(Exception):
    """An expectation that did not come true."""


class Player:
    def __init__(
        self, scenario: Scenario, mode: str, family: str, topology: Topology, driver: Driver, barrier: Barrier
    ) -> None:
        self.scenario = scenario
        self.applied: dict[Key, Json] = {}
        """The objects of the scenario, as they are now."""
        self._performed: Step = {}
        self._mode = mode
        self._family = family
        self._topology = topology
        self._driver = driver
        self._barrier = barrier
        self._conversations: dict[str, dialing.Conversation] = {}
        self._visited: set[str] = set()
        """The hosts other than the node on which programs ran."""
        self._traffic: dict[str, dialing.Traffic] = {}
        self._remembered: Remembered = {}
        self._actions: Mapping[str, Callable[[Any, Step], None]] = {
            "apply": self._apply, "apply_invalid": self._apply, "delete": self._delete,
            "probe": self._probe, "open": self._open, "exchange": self._exchange,
            "close": self._close, "reset": self._reset,
            "traffic": self._start_traffic, "stop_traffic": self._stop_traffic,
            "exec": self._exec, "http": self._http, "proxy": self._proxy, "rules": self._rules,
            "wait": self._wait, "counted": self._counted, "repeat": self._repeat,
        }  # fmt: skip

    @property
    def step_text(self) -> str:
        """The step that is performed."""
        return yaml.safe_dump(dict(self._performed), default_flow_style=None, width=100)

    def play(self, *, is_excusable: bool = False) -> None:
        """Play the whole scenario. Raises Failure at the first expectation that does not come true.

        With *is_excusable*, raises Unavailable if the backend announces a caveat about the first objects.
        """
        self._driver.ensure(self._mode, self._config(self.scenario.config))
        self._step({"apply": list(self.scenario.objects)})
        if is_excusable and (announced := self._driver.announced()):
            raise Unavailable(f"the backend announces: {announced}")
        for step in self.scenario.steps:
            self._step(step)

    def tidy(self) -> None:
        """Undo the scenario's changes, and wait until the proxy has noticed."""
        for traffic in self._traffic.values():
            traffic.stop()
        for conversation in self._conversations.values():
            conversation.close()
        for host in self._visited:
            self._topology[host].attempt("nft", "flush", "ruleset")
        base = {objects.key_of(obj): obj for obj in objects.base_objects(self._topology.families)}
        for key, obj in self.applied.items():
            if key in base:
                self._driver.apply(base[key])
            elif obj["kind"] != "Node":
                self._driver.delete(obj)
        if self._driver.is_running:
            self._barrier.wait()
        self._topology["node"].forget_connections()

    def _config(self, overrides: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = objects.substitute(overrides, self._family)
        return found

    def _step(self, step: Step) -> None:
        limits = {"modes": self._mode, "families": self._family, "drivers": self._driver.name}
        if any(key in step and mine not in step[key] for key, mine in limits.items()):
            return
        (action,) = [name for name in self._actions if name in step]
        self._performed = step
        self._actions[action](step[action], step)

    # Objects

    def _sync(self, step: Step) -> None:
        if step.get("sync", True):
            self._barrier.wait()

    def _apply(self, entries: Sequence[Step], step: Step) -> None:
        may_be_rejected = "apply_invalid" in step
        for entry in entries:
            obj = objects.build(entry, self._family)
            with suppress(*([Rejected] if may_be_rejected else [])):
                self._driver.apply(obj)
                self.applied[objects.key_of(obj)] = obj
        self._sync(step)

    def _delete(self, references: Sequence[str], step: Step) -> None:
        for text in references:
            obj = objects.reference(text)
            self._driver.delete(obj)
            self.applied.pop(objects.key_of(obj), None)
        self._sync(step)

    # Packets

    def _sources(self, spec: Step) -> list[str | None]:
        source = spec.get("source")
        if source is None:
            return [None]
        listed = source if isinstance(source, list) else [source]
        return [resolve(symbol, self._family) for symbol in expand(listed)]

    def _target(self, spec: Step) -> tuple[Namespace, str, int]:
        return self._topology[spec["from"]], resolve(spec["to"], self._family), spec["port"]

    def _probe(self, spec: Step, step: Step) -> None:
        expectation = Expectation(
            step.get("expect", {}), self._family, self._remembered, host_pods=self._topology.host_pods,
            client=spec["from"])
        silent = SILENT / patience() if expectation.is_silence else SILENT
        timeout = spec.get("timeout", dialing.ATTEMPT_TIMEOUT if expectation.answers else silent)
        count = spec.get("count", expectation.default_count)
        sources = [source for source in self._sources(spec) for _ in range(count)]

        def attempt(source: str | None) -> dialing.Outcome:
            protocol = spec.get("proto", "tcp")
            return dialing.dial(*self._target(spec), source=source, timeout=timeout, protocol=protocol)

        def burst() -> Attempts:
            if not expectation.answers:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    return list(zip(sources, pool.map(attempt, sources), strict=True))
            attempts: list[tuple[str | None, dialing.Outcome]] = []
            for source in sources:
                attempts.append((source, attempt(source)))
                if attempts[-1][1].kind == dialing.DROPPED:
                    break
            return attempts

        self._check_explanation(spec, self._expect(expectation, burst, spec), of_all=expectation.is_of_all)

    def _check_explanation(self, spec: Step, attempts: Attempts, *, of_all: bool) -> None:
        """Ask about the packets of *attempts* from the first source. Raises Failure if they contradict it."""
        _, to, port = self._target(spec)
        source, first = attempts[0]
        where = f"[{to}]:{port}" if ":" in to else f"{to}:{port}"
        sender = first.own_client or source or resolve(spec["from"], self._family)
        packet = {"to": f"{where}/{spec.get('proto', 'tcp')}", "from": sender}
        problem = ""

        def is_explained() -> bool:
            nonlocal problem
            problem = ""
            for answer in self._driver.explained([packet]) or ():
                if found := contradictions(
                    answer, attempts, of_all=of_all, host_pods=self._topology.host_pods
                ):
                    text = yaml.safe_dump(answer, default_flow_style=None, width=100)
                    problem = f"kproxy explain {sender} {packet['to']}: {'; '.join(found)}\n{text}"
            # A relay may serve a moment before its answer to the order is read.
            return _UNANSWERED not in problem

        dialing.wait_until(is_explained, DEADLINE)
        if problem:
            raise Failure(problem)

    def _open(self, spec: Step, step: Step) -> None:
        def attempt() -> Attempts:
            conversation = dialing.Conversation(
                *self._target(spec), protocol=spec.get("proto", "tcp"), source=self._sources(spec)[0],
                source_port=spec.get("source_port", 0),
            )  # fmt: skip
            if previous := self._conversations.pop(spec["name"], None):
                previous.reset()  # A mode that retires waits for connections that were closed.
            self._conversations[spec["name"]] = conversation
            return [(None, conversation.start())]

        self._expect_of_one(attempt, spec, step)

    def _exchange(self, spec: str | Step, step: Step) -> None:
        named = {"name": spec} if isinstance(spec, str) else spec
        conversation = self._conversations[named["name"]]
        self._expect_of_one(lambda: [(None, conversation.exchange())], named, step)

    def _expect_of_one(self, attempt: Callable[[], Attempts], spec: Step, step: Step) -> None:
        """Judge a conversation by its single answers."""
        expect = step.get("expect", {})
        self._expect(Expectation(expect, self._family, self._remembered, all_of=False), attempt, spec)

    def _expect(self, expectation: Expectation, attempts: Callable[[], Attempts], spec: Step) -> Attempts:
        """Make *attempts* until they are as expected. Return the last. Raises Failure after the deadline."""
        problem = ""
        made: Attempts = ()

        def is_as_expected() -> bool:
            nonlocal problem, made
            made = attempts()
            problem = expectation.judge(made)
            return not problem

        patience = 0 if spec.get("at_once") else spec.get("deadline", DEADLINE)
        if not dialing.wait_until(is_as_expected, patience):
            raise Failure(problem)
        expectation.remember()
        return made

    def _close(self, name: str, _: Step) -> None:
        self._conversations.pop(name).close()

    def _reset(self, name: str, _: Step) -> None:
        self._conversations.pop(name).reset()

    def _start_traffic(self, spec: Step, _: Step) -> None:
        attempt = partial(
            dialing.dial, *self._target(spec), protocol=spec.get("proto", "tcp"),
            timeout=spec.get("timeout", 2),
        )
        self._traffic[spec["name"]] = dialing.Traffic(attempt, spec.get("interval", 0.005))

    def _stop_traffic(self, spec: str | Step, _: Step) -> None:
        named: Step = {"name": spec} if isinstance(spec, str) else spec
        traffic, at_least = self._traffic.pop(named["name"]), named.get("at_least", 20)
        dialing.wait_until(lambda: traffic.made >= at_least, DEADLINE)
        outcomes = traffic.stop()
        bad = [outcome for outcome in outcomes if outcome.kind != dialing.REACHED]
        if len(bad) > named.get("max_failures", 0):
            kinds = collections.Counter(outcome.kind for outcome in bad)
            raise Failure(f"{len(bad)} of {len(outcomes)} conversations failed: {dict(kinds)}")
        if len(outcomes) < at_least:
            raise Failure(f"only {len(outcomes)} conversations took place")

    # The node and the proxy

    def _exec(self, spec: Step, step: Step) -> None:
        command = objects.substitute(spec["run"], self._family)
        host = spec.get("in", "node")
        if host != "node":
            self._visited.add(host)
        expect = step.get("expect", {})
        seen = ""

        def is_as_expected() -> bool:
            nonlocal seen
            done = self._topology[host].attempt("sh", "-c", command)
            seen = f"exit {done.returncode}\n{done.stdout}"
            return (
                done.returncode == expect.get("exit", 0)
                and all(text in done.stdout for text in expect.get("has", ()))
                and not any(text in done.stdout for text in expect.get("lacks", ()))
            )

        if not dialing.wait_until(is_as_expected, spec.get("deadline", 0), interval=0.1):
            raise Failure(f"expected {expect}, got {seen}")

    def _http(self, spec: Step, step: Step) -> None:
        expect = step.get("expect", {})
        host = self._topology[spec.get("from", "node")]
        address = resolve(spec.get("to", "127.0.0.1"), self._family)
        problems: list[str] = []

        def is_as_expected() -> bool:
            problems[:] = _http_problems(
                dialing.http_get(host, address, spec["port"], spec["path"], spec.get("headers")), expect
            )
            return not problems

        if not dialing.wait_until(is_as_expected, spec.get("deadline", DEADLINE), interval=0.1):
            raise Failure("; ".join(problems))

    def _proxy(self, spec: str | Step, step: Step) -> None:
        named: Step = {"do": spec} if isinstance(spec, str) else spec
        do = named["do"]
        if do in ("stop", "restart", "kill"):
            self._driver.stop(signal.SIGKILL if do == "kill" else signal.SIGTERM)
        if do == "cleanup":
            self._driver.cleanup()
        if do == "retire":
            self._driver.retire()
        if do == "retired":
            self._await_retirement()
        if do in ("start", "restart"):
            config = self._config(named.get("config", self.scenario.config))
            self._driver.start(named.get("mode", self._mode), config)
            self._sync(step)

    def _await_retirement(self) -> None:
        calls: list[Leftovers] = []

        def has_retired() -> bool:
            calls.append(self._driver.retire())
            return not calls[-1].is_needed

        if not dialing.wait_until(has_retired, RETIRED_WITHIN + GIVEN_UP / patience(), 0.1):
            raise Failure(f"after {len(calls)} calls it waits, though all connections ended: {calls[-1]}")

    def _rules(self, spec: Step, _: Step) -> None:
        text = ruleset(self._topology["node"])
        for pattern in spec.get("has", ()):
            if not re.search(pattern, text, re.M):
                raise Failure(f"the ruleset has nothing like {pattern!r}")
        for pattern in spec.get("lacks", ()):
            if found := re.search(pattern, text, re.M):
                raise Failure(f"the ruleset has {found.group()!r}")

    def _counted(self, spec: Mapping[str, int], _: Step) -> None:
        """Compare all counts of the frontends in *spec*, which is like ``tcp vip1:80 pod1: 5``."""
        wanted, frontends = {}, set()
        for text, number in spec.items():
            protocol, frontend, *endpoint = text.split()
            symbol, port = frontend.split(":")
            dialled = protocol, resolve(symbol, self._family), int(port)
            frontends.add(dialled)
            wanted[*dialled, resolve("".join(endpoint), self._family)] = number
        found = {k: n for k, n in self._driver.counted(self._family).items() if k[:3] in frontends and n}
        if found != {key: number for key, number in wanted.items() if number}:
            raise Failure(f"the backend counted {found}, expected {wanted}")

    def _wait(self, seconds: float, _: Step) -> None:
        time.sleep(seconds)

    def _repeat(self, spec: Step, _: Step) -> None:
        for _round in range(spec["times"]):
            for step in spec["steps"]:
                self._step(step)


def _http_problems(answer: dialing.HttpAnswer | None, expect: Any) -> list[str]:
    if answer is None or expect == "no answer":
        return [] if answer is None and expect == "no answer" else [f"answer: {answer}"]
    found = [f"no {text!r} in the body" for text in expect.get("has", ()) if not _has(text, answer.body)]
    found += [f"{text!r} in the body" for text in expect.get("lacks", ()) if _has(text, answer.body)]
    found += [
        f"header {name} is {answer.headers.get(name)!r}, not {value!r}"
        for name, value in expect.get("headers", {}).items() if answer.headers.get(name) != value
    ]  # fmt: skip
    if answer.status != expect.get("status", 200):
        found.append(f"status {answer.status}")
    return [*found, f"body: {answer.body[:1000]}"] if found else []


def _has(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.M) is not None


PROBLEMS = (Failure, DriverError, Rejected)
"""Exceptions of a failed scenario. Any other exception is a mistake in the scenario or the player."""
