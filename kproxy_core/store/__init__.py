"""Events from sources, folded into one state. No I/O."""
