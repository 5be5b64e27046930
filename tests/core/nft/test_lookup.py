"""Tables and chains of nf_tables, looked up in a network namespace."""

import errno
import os
from unittest.mock import patch

import pytest

from kproxy_conformance.checks.privileges import without_privileges
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.rulesets import chain_exists, table_exists
from kproxy_core.model.address import Family
from kproxy_core.netlink.sockets import NetlinkSocket
from tests.core.namespaces import namespace


def test_tables_and_chains_are_found_by_family_and_name() -> None:
    def look() -> list[bool]:
        return [
            table_exists(Family.IPV6, "mine"), table_exists(Family.IPV4, "mine"),
            table_exists(Family.IPV6, "yours"),
            chain_exists(Family.IPV6, "mine", "one"), chain_exists(Family.IPV6, "mine", "two"),
            chain_exists(Family.IPV6, "yours", "one"),
        ]

    with namespace() as node:
        node.nft("add table ip6 mine; add chain ip6 mine one")
        assert node.inside(look) == [True, False, False, True, False, False]


def test_a_refused_look_is_not_taken_for_absence() -> None:
    with without_privileges(), pytest.raises(HostError, match="ip mine: Operation not permitted"):
        table_exists(Family.IPV4, "mine")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPROTONOSUPPORT])
def test_a_kernel_without_nf_tables_has_no_table(code: int) -> None:
    with patch.object(NetlinkSocket, "open", side_effect=OSError(code, os.strerror(code))):
        assert not table_exists(Family.IPV4, "mine")
