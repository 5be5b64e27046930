"""The nouns of kproxy: immutable values, standard library only, no I/O."""
