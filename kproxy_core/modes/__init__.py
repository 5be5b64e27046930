"""The change of modes: start, switch, prove, retire, clean up."""
