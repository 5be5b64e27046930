"""The options that each mode says it has are those that it reads and that its page describes."""

import json
import re
from pathlib import Path

import pytest

from kproxy_core.config.file import API_VERSION, KIND, decode
from kproxy_core.config.flags import Flags
from kproxy_core.contract.errors import InvalidOption
from kproxy_core.contract.registry import Registry
from kproxy_core.contract.values import BackendSettings
from kproxy_core.model.address import Family
from kproxy_core.modes.choice import conclude
from kproxy_core.modes.settings import Configuration

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("mode", ["nftables", "userspace", "ebpf"])
def test_every_option_is_read(mode: str) -> None:
    registry = Registry()
    for name in registry.options(mode) or ():
        settings = BackendSettings((Family.IPV4,), options={name: object()}, sources={name: f"--{name}"})
        with pytest.raises(InvalidOption, match=f"^--{name}: "):
            registry.make_backend(mode, settings)


@pytest.mark.parametrize("mode", ["userspace", "ebpf"])
def test_every_option_is_described(mode: str) -> None:
    section = (DOCS / f"{mode}.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    described = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert sorted(described) == sorted(Registry().options(mode) or ())


@pytest.mark.parametrize("options", [{"flowtable": ["eth0/x"]}, {"flowtabel": ["eth0"]}])
def test_without_a_mode_a_wrong_option_of_the_first_one_is_not_passed_over(options: object) -> None:
    file = decode(json.dumps({
        "apiVersion": API_VERSION, "kind": KIND, "kproxy": {"backendOptions": {"nftables": options}},
    }))  # fmt: skip
    with pytest.raises(InvalidOption, match=r"^kproxy\.backendOptions\.nftables\.flowtab"):
        conclude(Configuration(Flags(), file), Registry(), (Family.IPV4,))
