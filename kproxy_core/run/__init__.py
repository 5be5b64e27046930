"""The running process: loop, pacing, health, metrics."""
