"""Objects and elements of nf_tables tables, counters of their sets, and packets of questions. Knows no mode."""
