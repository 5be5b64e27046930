"""Answers about the plans and the kernel, for the control socket and for commands without a running proxy."""
