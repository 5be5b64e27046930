"""The ebpf backend: local sockets are sent to an endpoint at connect(); the nftables rules serve all else."""
