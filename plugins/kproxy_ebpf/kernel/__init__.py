"""The kernel objects of the ebpf mode: bpf(2), maps, programs, pins and cgroups. All of its input and
output."""
