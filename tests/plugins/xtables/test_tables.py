"""The choice of the variant, and reading and writing of tables in a network namespace."""

import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kproxy_core.linux import programs
from kproxy_core.linux.errors import HostError
from kproxy_core.linux.programs import ProgramUnfinished
from kproxy_core.model.address import Family
from kproxy_xtables.rules import SavedChain, read_saved
from kproxy_xtables.tables import Busy, RestoreFailed, Tables, Unusable
from kproxy_xtables.variant import KUBELET_CHAINS, Variant, find_variant, find_variants, prefers_nft, probe
from tests.core.namespaces import Namespace, namespace

HINT = ":KUBE-IPTABLES-HINT - [0:0]\n"
OLD_HINT = ":KUBE-KUBELET-CANARY - [0:0]\n"
RULE = "-A INPUT -j ACCEPT\n"

NOTHING: tuple[str, ...] = ()

VARIANTS = pytest.mark.parametrize("variant", find_variants(), ids=str)


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace() as made:
        yield made


@pytest.mark.parametrize(
    ("nft", "legacy", "default_is_nft", "expected"),
    [
        ((HINT,), NOTHING, False, True),
        ((OLD_HINT,), NOTHING, False, True),
        (NOTHING, (HINT,), True, False),
        (NOTHING, (OLD_HINT,), True, False),
        ((HINT,), (HINT,), False, True),
        ((HINT,), (RULE, RULE), False, True),
        ((RULE, RULE, RULE), (HINT,), True, False),
        ((RULE,), (RULE, RULE), True, False),
        ((RULE, RULE), (RULE,), False, True),
        ((RULE,), (RULE,), False, True),
        (NOTHING, NOTHING, True, True),
        (NOTHING, NOTHING, False, False),
    ],
)
def test_the_variant_is_chosen_by_evidence(
    nft: tuple[str, ...], legacy: tuple[str, ...], default_is_nft: bool, expected: bool
) -> None:
    def save(of_nft: bool) -> tuple[str, ...]:
        return nft if of_nft else legacy

    kubelet_uses_nft = any(line in (HINT, OLD_HINT) for line in nft)
    assert prefers_nft(kubelet_uses_nft, save, default_is_nft) is expected


def test_both_variants_are_found() -> None:
    assert sorted(variant.nft for variant in find_variants()) == [False, True]


def test_a_program_is_asked_for_its_version_once_until_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [tmp_path / f"iptables-nft{action}" for action in ("", "-save", "-restore")]
    for name in names:
        name.touch()
    asked: list[str] = []

    def output(program: str, *_: str) -> str:
        asked.append(program)
        return f"iptables v1.8.{len(asked)} (nf_tables)"

    monkeypatch.setattr(programs, "find", lambda name: str(tmp_path / name))
    monkeypatch.setattr(programs, "output", output)
    assert probe("-nft") == probe("-nft") == Variant(True, "-nft", (1, 8, 1))
    os.utime(names[0], (0, 0))
    assert probe("-nft") == Variant(True, "-nft", (1, 8, 2))


@VARIANTS
@pytest.mark.parametrize(("family", "chain"), [*zip(Family, KUBELET_CHAINS, strict=True)])
def test_kubelets_variant_is_chosen(node: Namespace, variant: Variant, family: Family, chain: str) -> None:
    other = next(each for each in find_variants() if each.nft is not variant.nft)
    node.run(other.program(Family.IPV6), "-w", "-A", "INPUT", "-j", "ACCEPT")
    node.run(variant.program(family), "-w", "-t", "mangle", "-N", chain)
    assert node.inside(find_variant) == variant


@pytest.mark.parametrize("action", ["", "-save"])
def test_no_variant_is_chosen_while_the_rules_of_one_are_unknown(
    node: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, action: str
) -> None:
    """On a busy node a program may time out, or be killed. kubelet's variant would then seem to be absent."""
    legacy = next(variant for variant in find_variants() if not variant.nft)
    node.run(legacy.program(Family.IPV4), "-w", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    program = tmp_path / f"iptables-legacy{action}"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ProgramUnfinished, match=f"iptables-legacy{action}: killed"):
        node.inside(find_variant)


def test_choosing_creates_nothing_and_runs_no_program_without_rules(
    node: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = node.inside(find_variant)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "lines", None)
        assert node.inside(find_variant) == variant
        legacy = next(each for each in find_variants() if not each.nft)
        assert node.inside(lambda: Tables(Family.IPV4, legacy).chains()) == {}
    assert node.run("nft", "list", "ruleset") == ""


def test_saved_output_is_split_into_chains() -> None:
    lines = """# a comment
*nat
:PREROUTING ACCEPT [1:60]
:EMPTY - [0:0]
:ONE - [0:0]
-A PREROUTING -m comment --comment "a -A b" -j ONE
-A ONE -m nfacct --nfacct-name  seen -j RETURN
-A ONE
-A ONE -j DROP
COMMIT
*filter
:ONE - [0:0]
COMMIT
""".splitlines(keepends=True)
    found = {(saved.table, saved.name): saved.rules for saved in read_saved(lines)}
    assert found == {
        ("nat", "PREROUTING"): ['-m comment --comment "a -A b" -j ONE'],
        ("nat", "ONE"): ["-m nfacct --nfacct-name seen -j RETURN", "", "-j DROP"],
        ("nat", "EMPTY"): [],
        ("filter", "ONE"): [],
    }


@VARIANTS
@pytest.mark.parametrize("family", list(Family))
def test_restored_rules_are_saved_and_listed(node: Namespace, variant: Variant, family: Family) -> None:
    tables = Tables(family, variant)

    def act() -> list[SavedChain]:
        tables.restore("*nat\n:MINE - [0:0]\n-A MINE -j RETURN\n-A POSTROUTING -j MINE\nCOMMIT\n")
        assert tables.has_chain("nat", "MINE")
        assert not tables.has_chain("nat", "YOURS")
        assert tables.rules("nat", "POSTROUTING") == ["-j MINE"]
        with pytest.raises(HostError):
            tables.rules("nat", "YOURS")
        return [saved for saved in tables.save() if saved.lines]

    assert sorted(node.inside(act)) == [
        SavedChain("nat", "MINE", ["-A MINE -j RETURN\n"]),
        SavedChain("nat", "POSTROUTING", ["-A POSTROUTING -j MINE\n"]),
    ]


@VARIANTS
def test_usable_tables_pass_the_check(node: Namespace, variant: Variant) -> None:
    tables = Tables(Family.IPV4, variant)
    node.inside(tables.check)
    assert not node.inside(tables.is_missing)


def test_a_held_lock_is_not_a_missing_table(
    node: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    legacy = next(variant for variant in find_variants() if not variant.nft)
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    tables = Tables(Family.IPV4, legacy, lock_timeout=1)
    with (tmp_path / "xtables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Busy):
            node.inside(tables.check)
        assert not node.inside(tables.is_missing)


def test_a_program_that_times_out_does_not_make_tables_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables(Family.IPV4, find_variants()[0])
    monkeypatch.setattr(programs, "run", partial(programs.run, timeout=0.0))
    with pytest.raises(ProgramUnfinished, match="timed out"):
        tables.check()
    assert not tables.is_missing()


def test_a_program_that_fails_makes_tables_unusable() -> None:
    tables = Tables(Family.IPV4, Variant(nft=False, infix="-nowhere", version=(1, 8)))
    with pytest.raises(Unusable, match="iptables-nowhere"):
        tables.check()
    assert tables.is_missing()


@VARIANTS
def test_a_refusal_names_the_rule_and_changes_nothing(node: Namespace, variant: Variant) -> None:
    tables = Tables(Family.IPV4, variant)

    def act() -> None:
        tables.restore("*filter\n:MINE - [0:0]\n-A MINE -j NOWHERE\nCOMMIT\n")

    with pytest.raises(RestoreFailed) as refused:
        node.inside(act)
    assert refused.value.line in ("-A MINE -j NOWHERE", "")  # the legacy program may name the table only
    assert str(refused.value).startswith(f"{variant.program(Family.IPV4, 'restore')}: exit ")
    assert not node.inside(lambda: tables.has_chain("filter", "MINE"))
