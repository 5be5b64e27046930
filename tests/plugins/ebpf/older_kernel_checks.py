"""Tests for Linux 6.1 alone, run by test_older_kernel.py in a guest."""


def test_connected_udp_is_left_to_the_rules() -> None:
    """The guest's kernel has no CONFIG_INET_DIAG_DESTROY."""
    from kproxy_core.linux.sockets import udp_destruction_problem

    assert udp_destruction_problem() == "the kernel has no CONFIG_INET_DIAG_DESTROY"
