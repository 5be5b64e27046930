"""Input and output of the mode. Decides nothing about what to write."""
