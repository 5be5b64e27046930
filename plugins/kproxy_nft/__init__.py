"""Tables of nf_tables, counters of their sets, and packets of questions, for all backends. Knows no mode."""
