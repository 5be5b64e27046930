"""The userspace backend: portals redirect to relays, which copy the bytes between clients and endpoints."""
