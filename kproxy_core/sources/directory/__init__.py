"""A directory of manifests as a source of events."""
