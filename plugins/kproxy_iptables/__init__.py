"""The iptables backend: kube-proxy's chains and rules, written only where they change.

Only `kernel`, `watch`, `detect` and `cleanup` do input and output.
"""
