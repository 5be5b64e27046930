"""Objects and elements of nf_tables tables, and counters of their sets, shared by backends. Knows no mode."""
