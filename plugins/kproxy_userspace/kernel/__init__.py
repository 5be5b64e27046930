"""All input and output of the mode in the proxy's process: rules, ports, conntrack and relay workers.

Decisions about what must be open or written do not belong here.
"""
