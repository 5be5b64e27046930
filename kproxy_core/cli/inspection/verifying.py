"""``kproxy verify --traffic``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kproxy_core.cli.inspection.comparing import DIFFERENT, SAME
from kproxy_core.cli.options import OBJECTS
from kproxy_core.cli.terminal import bad, good, hint
from kproxy_core.config.flags import Flags
from kproxy_core.explain.traffic import Attempt, connections, result
from kproxy_core.modes.control import send_request

Found = Mapping[str, Any]


def read_targets(flags: Flags, service: str) -> Found:
    """Return the mode, and what connections of this node should do at each TCP frontend.

    Raises NoAnswer, NoProxy or RequestRefused, and as `cli_errors` expects.
    """
    if not OBJECTS & set(flags):
        found = send_request({"do": "targets", "service": service})
    else:
        from kproxy_core.cli.inspection.objects import read_objects
        from kproxy_core.explain.traffic import targets
        from kproxy_core.process.inspection.explaining import expectations

        with read_objects(flags, this_machine=True) as (plans, _, instance, *_):
            found = {"mode": instance.mode, "targets": expectations(targets(plans, service), instance)}
    return found


def verify(found: Found, *, rate: float, most: int, timeout: float) -> tuple[Found, str]:
    """Open the connections. Return the results, and the reason why endpoints are unknown, if they are."""
    from contextlib import ExitStack

    from kproxy_core.cli.inspection.connecting import Connector
    from kproxy_core.host.conntrack.events import flow_events
    from kproxy_core.host.errors import HostError

    targets, problem = found["targets"], ""
    with ExitStack() as stack:
        events = None
        try:
            events = stack.enter_context(flow_events(only_new=True))
        except HostError as error:
            problem = f"endpoints are not told apart: {error}"
        attempts: Sequence[Sequence[Attempt]] = Connector(
            targets, events, rate=rate, most=most, timeout=timeout).run()
    results = [result(target, tried) for target, tried in zip(targets, attempts, strict=True)]
    return {"mode": found["mode"], "frontends": results}, problem


def status_of(found: Found) -> int:
    return DIFFERENT if any(frontend["problems"] for frontend in found["frontends"]) else SAME


def announced(found: Found, most: int, rate: float) -> Iterator[str]:
    total = 0
    for target in found["targets"]:
        count = connections(target, most)
        total += count
        yield (f"{target['frontend']}/TCP of {target['service_port']}: up to {count} connections, "
               f"should be {target['outcome']}")
    yield f"up to {total} connections in {total / rate:.0f} s"


def as_text(found: Found) -> str:
    lines = [line for frontend in found["frontends"] for line in _lines(frontend)]
    wrong = sum(bool(frontend["problems"]) for frontend in found["frontends"])
    count = len(found["frontends"])
    lines.append(bad(f"{wrong} of {count} frontends have problems") if wrong
                 else good(f"{count} of {count} frontends do what the plans say ({found['mode']})"))
    return "\n".join(lines)


def _lines(frontend: Mapping[str, Any]) -> Iterator[str]:
    verdict = bad("problem") if frontend["problems"] else good("ok")
    yield f"{frontend['frontend']}/TCP of {frontend['service_port']}: {verdict}"
    for reached in frontend["reached"]:
        counts = ", ".join(f"{name} {count}" for name, count in reached.items() if name != "endpoint")
        yield f"  {reached['endpoint'] or 'endpoint not known':24}  {counts}"
    seen = {reached["endpoint"] for reached in frontend["reached"]}
    missed = [endpoint for endpoint in frontend["endpoints"] if endpoint not in seen]
    if missed and "" not in seen:
        yield hint(f"  not chosen in {frontend['connections']} connections: {', '.join(missed)}")
    for problem in frontend["problems"]:
        yield f"  {bad(problem)}"
