"""Scenarios as data, and the player that plays them against any driver."""
