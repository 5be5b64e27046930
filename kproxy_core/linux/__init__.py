"""The node as all backends share it: devices, conntrack, sockets, programs, files. Knows no backend."""
