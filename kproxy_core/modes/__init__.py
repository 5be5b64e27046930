"""The change of modes: start, switch, prove, retire, take over. Knows no mode by name."""
