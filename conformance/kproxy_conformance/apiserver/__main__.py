"""Run the API server: ``python -m kproxy_conformance.apiserver --gen services=1000``; it prints its URL."""

import argparse
from contextlib import suppress
from pathlib import Path

from kproxy_conformance.apiserver import objects
from kproxy_conformance.apiserver.server import Server
from kproxy_conformance.apiserver.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description="static Kubernetes API server")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; it is printed")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--gen", default="", help="make the objects: 'services=1000,endpoints=5,seed=1'")
    parser.add_argument("--manifests", type=Path, help="or read them from a directory of List files")
    parser.add_argument("--watch-list", choices=("on", "off"), default="on", help="support sendInitialEvents")
    parser.add_argument("--drop-managed-fields", choices=("on", "off"), default="on",
                        help="leave them out where clients ask for it")
    parser.add_argument("--bookmark-interval", type=float, default=60.0)
    parser.add_argument("--version", type=int, default=1000, help="resource version before the first object")
    parser.add_argument("--verbose", action="store_true", help="log the requests")
    options = parser.parse_args()
    if options.manifests:
        made = objects.read(options.manifests)
    else:
        made = objects.generate(objects.Options.parse(options.gen))
    server = Server(
        (options.address, options.port), Store(made, options.version), watch_list=options.watch_list == "on",
        drop_managed_fields=options.drop_managed_fields == "on",
        bookmark_interval=options.bookmark_interval, verbose=options.verbose,
    )  # fmt: skip
    print(f"http://{options.address}:{server.port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
