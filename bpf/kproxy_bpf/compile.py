"""Compile the BPF programs with bcc. A script for a short-lived process: bcc and LLVM take 120 MiB.

Usage: ``python compile.py SOURCE HEADERS PROGRAMS MAPS``, the last two as names with commas between. Writes
`kproxy_ebpf.kernel.programs.Compiled` to standard output, as JSON. Imports nothing of kproxy, so that any
interpreter that finds bcc can run it: setup.py has it run for a wheel, and the ebpf mode where the wheel has
no programs or the kernel refuses them. bcc makes the maps, too, which needs CAP_BPF and CAP_NET_ADMIN.
"""

import base64
import json
import os
import struct
import sys

_LD_IMM64 = 0x18
_PSEUDO_MAP_FD = 1


def main(source: str, headers: str, programs: list[str], maps: list[str]) -> None:
    """Compile the file *source* against the directory *headers*, and print the result."""
    os.environ["BCC_KERNEL_SOURCE"] = headers  # Read when bcc is imported.
    from bcc import BPF, lib

    with open(source, encoding="utf-8") as file:
        module = BPF(text=file.read(), cflags=["-Wall", "-Werror", "-Wno-unused-function"])
    definitions = {}
    by_fd = {}
    for name in maps:
        number = lib.bpf_table_id(module.module, name.encode())
        by_fd[lib.bpf_table_fd(module.module, name.encode())] = name
        definitions[name] = [property_of(module.module, number) for property_of in (
            lib.bpf_table_type_id, lib.bpf_table_key_size_id, lib.bpf_table_leaf_size_id,
            lib.bpf_table_max_entries_id, lib.bpf_table_flags_id)]
    compiled = {}
    for name in programs:
        code = bytearray(module.dump_func(name.encode()))
        references = []
        for at in range(0, len(code), 8):
            operation, registers, _, value = struct.unpack_from("=BBhi", code, at)
            if operation == _LD_IMM64 and registers >> 4 == _PSEUDO_MAP_FD:
                references.append((at, by_fd[value]))
                struct.pack_into("=i", code, at + 4, 0)
        compiled[name] = base64.b64encode(code).decode(), references
    json.dump((definitions, compiled), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4].split(","))
