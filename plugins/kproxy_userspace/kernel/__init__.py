"""All input and output of the mode in the proxy's process: rules, ports, conntrack and relay workers."""
