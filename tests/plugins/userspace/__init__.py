"""Tests of the userspace backend."""
