"""The demo: kproxy serves the shop of ``examples/shop`` in a sandbox of network namespaces."""
