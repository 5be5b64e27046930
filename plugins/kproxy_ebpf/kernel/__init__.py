"""Input and output of the mode: bpf(2), maps, programs, pins and cgroups."""
