"""Traffic of Services: counts of connections, failures and bytes, kept across restarts, and their metrics."""
