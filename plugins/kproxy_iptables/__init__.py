"""The iptables backend: kube-proxy's chains and rules, written only where they change."""
