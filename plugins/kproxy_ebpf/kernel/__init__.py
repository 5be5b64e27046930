"""All input and output of the ebpf mode: bpf(2), maps, programs, pins and cgroups."""
