"""The sync loop: one thread that plans what changed and hands it to the backend."""
