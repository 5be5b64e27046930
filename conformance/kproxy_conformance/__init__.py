"""Public kit for authors of backends."""
