"""Elements and counters of nf_tables sets, shared by backends. Knows no mode."""
