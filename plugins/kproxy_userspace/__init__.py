"""The userspace backend: portals redirect to relays, which move the bytes."""
