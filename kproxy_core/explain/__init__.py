"""Questions about packets and their answers, for people and as JSON. Pure, and the same for every mode."""
