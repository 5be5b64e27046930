"""Rules and tables of nf_tables: described as values, written and read back over netlink."""
