"""The sync loop. Knows its observers by an interface only; of I/O it only deletes conntrack entries."""
