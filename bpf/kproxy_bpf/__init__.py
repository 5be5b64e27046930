"""The BPF programs of the ebpf mode, as C source, and the few headers that they are compiled against."""
