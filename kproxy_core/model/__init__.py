"""The nouns of kproxy: immutable values, no I/O."""
