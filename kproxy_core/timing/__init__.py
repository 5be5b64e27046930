"""Rates and delays as functions of a clock that the caller reads. Nothing here sleeps or reads the time."""
