"""A network namespace of its own for every test that asks for one."""

from tests.plugins.conftest import netns

__all__ = ["netns"]
