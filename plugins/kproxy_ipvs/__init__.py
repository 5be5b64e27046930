"""The ipvs backend: the kernel's load balancer, with ipsets and a few constant iptables rules around it."""
