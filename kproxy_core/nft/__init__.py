"""nf_tables as a library: rules, objects, elements, transactions, listings, notices. Knows no Service."""
