"""The nftables mode: constant rules, and map elements for Services. Only `kernel` does input and output."""
