"""A ``kubectl`` for docs/operating.md, with what the page needs, at the kit's API server.

It knows ``kubectl kproxy``, which is the real one, ``label`` and ``get events``, and writes as kubectl does.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]


class Cluster:
    """The API server of the kubeconfig."""

    def __init__(self) -> None:
        config = json.loads(Path(os.environ["KUBECONFIG"]).read_text(encoding="utf-8"))
        self._where = urlsplit(config["clusters"][0]["cluster"]["server"]).netloc

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        connection = HTTPConnection(self._where)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        found: Json = json.loads(connection.getresponse().read())
        return found


def label(cluster: Cluster, words: Sequence[str]) -> Iterator[str]:
    """``nodes [NAME...] [--selector=KEY=VALUE | --all] KEY=VALUE | KEY-``."""
    _, *names, change = words
    key, equals, value = change.rstrip("-").partition("=")
    for node in cluster.ask("GET", "/api/v1/nodes")["items"]:
        meta = node["metadata"]
        if not any(_selects(word, meta) for word in names):
            continue
        labels = {name: text for name, text in meta.get("labels", {}).items() if name != key}
        meta["labels"] = labels | ({key: value} if equals else {})
        cluster.ask("POST", "/bench/apply", {"apiVersion": "v1", "kind": "Node", **node})
        yield f"node/{meta['name']} {'labeled' if equals else 'unlabeled'}"


def _selects(word: str, meta: Json) -> bool:
    option, _, wanted = word.partition("=")
    if option == "--selector":
        key, _, value = wanted.partition("=")
        return bool(meta.get("labels", {}).get(key) == value)
    return word in ("--all", meta["name"])


def events(cluster: Cluster, words: Sequence[str]) -> Iterator[str]:
    """``--field-selector=reason=REASON``."""
    _, _, reason = words[-1].rpartition("=")
    yield f"{'LAST SEEN':<12}{'TYPE':<10}{'REASON':<19}{'OBJECT':<14}MESSAGE"
    for event in cluster.ask("GET", "/bench/events")["events"]:
        if event["reason"] == reason:
            where = f"node/{event['regarding']['name']}"
            yield f"{'2s':<12}{event['type']:<10}{reason:<19}{where:<14}{event['note']}"


def main(words: Sequence[str]) -> None:
    match words:
        case ["kproxy", *rest]:
            program = str(Path(sys.executable).with_name("kubectl-kproxy"))
            os.execv(program, [program, *rest])
        case ["label", *rest]:
            lines = label(Cluster(), rest)
        case ["get", "events", *rest]:
            lines = events(Cluster(), rest)
        case _:
            sys.exit(f"kubectl {' '.join(words)}: not known to this page")
    for line in lines:
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
