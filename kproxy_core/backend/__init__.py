"""The contract between the core and a backend plugin."""
