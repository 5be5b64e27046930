"""The commands that look at a node and change nothing: explain, diff, plan, verify, trace and report."""
