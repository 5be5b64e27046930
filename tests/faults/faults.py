"""Faults to plant in the code, one at a time, and the tests that must notice each."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault, planted by replacing a text that a file has once."""

    name: str
    file: str
    find: str
    instead: str
    tests: tuple[str, ...]
    """Arguments of pytest; at least one of these tests must fail."""
    verb: str = "test"
    """The lanes that have the tests: ``test`` or ``gate``."""


def _scenario(name: str, mode: str = "nftables", family: str = "ipv4") -> str:
    return f"tests/conformance/test_conformance.py::test_scenario[{mode}-{family}-{name}]"


FAULTS = (
    # kproxy_core/model
    Fault("delays-do-not-grow", "kproxy_core/model/timing.py",
          "min(self._next * 2, self._longest)", "min(self._next, self._longest)",
          ("tests/core/model/test_timing.py",)),
    # kproxy_core/plan
    Fault("no-limit-for-addresses", "kproxy_core/plan/budget.py",
          "most_external = min(external, max(0, budget.frontends // ports - 2))", "most_external = external",
          ("tests/core/plan/test_budget.py",)),
    Fault("terminating-endpoints-beside-ready-ones", "kproxy_core/plan/endpoints.py",
          "cluster = _near(ready, node) or fallback", "cluster = [*_near(ready, node), *fallback]",
          ("tests/core/plan/test_endpoints.py",)),
    Fault("a-source-range-admits-all", "kproxy_core/plan/service_plan.py",
          "if any(r.prefix == 0 for r in ranges):", "if ranges:",
          (_scenario("loadbalancer-source-ranges"),)),
    Fault("no-masquerade-for-hairpins", "kproxy_core/plan/endpoints.py",
          "tuple(dict.fromkeys([where.address for where, _ in hairpins])) if hairpins else (),", "(),",
          (_scenario("hairpin"),)),
    Fault("flows-of-a-removed-udp-endpoint-stay", "kproxy_core/plan/stale_flows.py",
          "if before.serving - after.serving or (after.serving and not before.serving):",
          "if after.serving and not before.serving:",
          (_scenario("udp-endpoint-removed"),)),
    # kproxy_core/netlink
    Fault("an-interrupted-dump-is-believed", "kproxy_core/netlink/sockets.py",
          "interrupted = interrupted or bool(flags & netlink.NLM_F_DUMP_INTR)", "interrupted = False",
          ("tests/core/netlink/test_sockets.py",)),
    # kproxy_core/nft
    Fault("constants-in-one-attribute", "kproxy_core/nft/objects.py",
          "for part in fitting(encoded):", "for part in (slice(None),):",
          ("tests/plugins/nftables/test_large_objects.py::test_any_number_of_service_networks",)),
    Fault("a-catch-all-element-stays", "kproxy_core/nft/transaction.py",
          "commands += table.delete_elements(container, [CATCH_ALL])", "pass",
          ("tests/plugins/test_counting_tables.py::test_damage_is_repaired_without_losing_counts",)),
    Fault("any-constant-fits-another-packet", "kproxy_core/nft/alike.py",
          "self.constants.add(wanted)", "pass",
          ("tests/plugins/nftables/test_explain.py::"
           "test_packets_that_are_asked_about_together_do_what_each_does_alone",)),
    # kproxy_core/linux
    Fault("resets-in-the-forward-hook", "kproxy_core/linux/resets.py",
          'Hook("filter", hook, _PRIORITY)',
          'Hook("filter", hook.replace("prerouting", "forward"), _PRIORITY)',
          (_scenario("removed-endpoints-reset-behind-a-bridge"),)),
    Fault("a-hanging-relay-worker-is-not-killed", "kproxy_core/linux/relay/pool.py",
          'killing it", extra={"fields": fields})\n                worker.kill()',
          'killing it", extra={"fields": fields})',
          ("tests/core/sync/test_node_port_relays.py::test_a_process_that_hangs_without_orders_is_noticed",)),
    Fault("affinity-outlives-its-endpoint", "kproxy_core/linux/relay/balancer.py",
          "return endpoint if endpoint in self._may_keep and now - since < self._clients.seconds else None",
          "return endpoint if now - since < self._clients.seconds else None",
          ("tests/core/linux/test_relay_balancer.py",)),
    # kproxy_core/contract
    Fault("a-plugin-ends-the-proxy", "kproxy_core/contract/calls.py",
          "except BaseException as error:  # foreign code may raise anything",
          "except NotImplementedError as error:",
          ("tests/core/contract/test_broken_plugins.py",)),
    # kproxy_core/config
    Fault("any-masquerade-bit", "kproxy_core/config/check.py",
          '("iptables.masqueradeBit", range(32).__contains__, _WITHIN_A_MARK),', "",
          ("tests/core/config/test_config.py", "tests/core/config/test_config_file.py")),
    # kproxy_core/kube
    Fault("a-slice-that-moves-is-ignored", "kproxy_core/kube/store.py",
          "if known is not None and (known.service != piece.service or known.family is not piece.family):",
          "if known is not None and known.family is not piece.family:",
          ("tests/core/kube/test_store.py",)),
    Fault("bookmarks-are-ignored", "kproxy_core/kube/reflector.py",
          "elif seen.resource_version:", 'elif seen.resource_version and seen.type != "BOOKMARK":',
          ("tests/core/kube/test_kubernetes_source_trouble.py::test_a_watch_is_resumed_after_a_bookmark",)),
    # kproxy_core/sync
    Fault("a-failed-sync-is-retried-at-once", "kproxy_core/sync/pacing.py",
          "self._retry_at = ended + self._failures.delay()", "self._retry_at = ended",
          ("tests/core/sync/test_pacing.py",)),
    Fault("what-is-withheld-is-deleted", "kproxy_core/sync/difference.py",
          "{key: self._plan_to_keep(key, left_out) for key in left_out}", "dict.fromkeys(left_out)",
          ("tests/core/sync/test_isolation.py",)),
    # kproxy_core/observe
    Fault("healthz-200-while-syncs-fail", "kproxy_core/observe/health.py",
          "return state.pending_since is not None and now - state.pending_since >= self._timeout",
          "return False",
          ("tests/core/observe/test_health.py",)),
    Fault("any-host-reads-the-metrics-port", "kproxy_core/observe/pages.py",
          "if request.host and not _is_of_node(request.host, names):",
          "if False:",
          ("tests/core/observe/test_http_routes.py::test_a_name_that_is_not_the_nodes_reads_and_changes_nothing",)),
    # kproxy_core/modes
    Fault("a-switch-skips-the-proof", "kproxy_core/modes/switch.py",
          "prove(loop, new, updates, report_progress)", "pass",
          ("tests/core/modes/test_switch.py",)),
    Fault("the-journal-is-not-written", "kproxy_core/modes/switch.py",
          "self._journal.write(Entry(self.configured, old.mode, mode, Phase.TRYING, self.reason))", "pass",
          ("tests/core/modes/test_switch.py",)),
    # kproxy_core/app
    Fault("explain-ignores-policy-local", "kproxy_core/app/explain.py",
          "if fate.policy in (Policy.INTERNAL_LOCAL, Policy.EXTERNAL_LOCAL) and not here:",
          "if fate.policy is Policy.INTERNAL_LOCAL and not here:",
          ("tests/core/app/test_explain.py",)),
    # kproxy_core/fleet
    Fault("a-rollout-goes-on-after-a-failure", "kproxy_core/fleet/switch.py",
          "return self.is_interrupted or bool(self.of(*FAILED))", "return self.is_interrupted",
          ("tests/core/fleet/test_switch.py",)),
    # kproxy_core/cli
    Fault("a-sender-may-be-given-twice", "kproxy_core/cli/explain.py",
          "if len(words) > 2 or (len(words) == 2 and sender):", "if len(words) > 2:",
          ("tests/core/cli/test_explain_command.py::test_a_question_has_one_sender_and_one_receiver",)),
    # conformance/kproxy_conformance
    Fault("scenarios-ignore-the-source", "conformance/kproxy_conformance/suite/expectation.py",
          "yield from self._source_problems(outcomes)", "pass",
          ("tests/kit/test_all_checks_can_fail.py::test_scenario_notices_its_sabotage[MasqueradesPods]",)),
    # plugins
    Fault("cleanup-leaves-kube-proxys-table", "plugins/kproxy_nftables/cleanup.py",
          "others = _marker if own_only else partial(_table, KUBE_PROXY_TABLE)", "others = _marker",
          ("tests/leftovers/test_cleanup.py::test_everything_of_kube_proxy_is_removed[nftables]",)),
    Fault("iptables-admits-one-source-range", "plugins/kproxy_iptables/wanted.py",
          'admitted = [f"-s {cidr} {comment} -j {chains.external}" for cidr in plan.source_ranges]',
          'admitted = [f"-s {cidr} {comment} -j {chains.external}" for cidr in plan.source_ranges[:1]]',
          ("tests/plugins/iptables/test_render.py::test_each_source_range_is_admitted",)),
    Fault("ipvs-forgets-its-hairpins", "plugins/kproxy_ipvs/wanted.py",
          "yield SetEntry(names.LOOP_BACK, entry)", "pass",
          ("tests/plugins/ipvs/test_render.py",)),
    Fault("relays-admit-every-source", "plugins/kproxy_userspace/wanted.py",
          "for source in outermost(plan.source_ranges) or (None,):", "for source in (None,):",
          ("tests/plugins/userspace/test_render.py",)),
    Fault("sockets-pass-source-ranges", "plugins/kproxy_ebpf/wanted.py",
          "for address in (plan.external_ips if plan.source_ranges else plan.external_addresses)",
          "for address in plan.external_addresses",
          ("tests/plugins/ebpf/test_wanted.py",)),
    Fault("foreign-jumps-keep-no-chain", "plugins/kproxy_xtables/removal.py",
          "chains = [key for key in held if key in ours and key not in used]",
          "chains = [key for key in held if key in ours]",
          ("tests/plugins/xtables/test_removal.py",)),
    Fault("negated-matches-of-iptables-are-not", "plugins/kproxy_xtables/walk.py",
          "negated(test) if is_negated else test", "test",
          ("tests/plugins/xtables/test_walk.py",)),
    Fault("rejections-are-not-counted", "plugins/kproxy_nft/counting.py",
          "(among(frontend, _UNSERVED), reject),", "",
          ("tests/switch/test_traffic.py::test_rejections_end_with_the_first_endpoint_and_begin_again_after_the_last",)),
)  # fmt: skip
