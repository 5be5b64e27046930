"""The kernel's connection tracking: its table, flows and settings. Does not decide which flows are stale."""
