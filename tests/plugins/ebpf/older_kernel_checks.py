"""Tests for Linux 6.1 alone, run by test_older_kernel.py in a guest."""


def test_a_family_that_lacks_what_notrack_needs_is_named() -> None:
    """The guest's nft_socket is built without IPv6."""
    from kproxy_core.model.address import Family
    from kproxy_ebpf.detect import lacking
    from kproxy_ebpf.settings import Settings

    problems = [problem for problem in lacking(Settings(notrack_mark=1 << 12)) if "socket in nf" in problem]
    assert len(problems) == 1
    assert "add rule ip6 kproxy-notrack prerouting" in problems[0]
    assert problems[0].endswith("leave out kproxy.backendOptions.ebpf.notrack")
    wanted = lacking(Settings(notrack_mark=1 << 12), [Family.IPV4])
    assert not any("socket in nf" in problem for problem in wanted)


def test_connected_udp_is_left_to_the_rules() -> None:
    """The guest's kernel has no CONFIG_INET_DIAG_DESTROY."""
    from kproxy_core.linux.udp_sockets import udp_destruction_problem

    assert udp_destruction_problem() == "the kernel has no CONFIG_INET_DIAG_DESTROY"
