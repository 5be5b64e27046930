"""The nftables backend: constant rules, and map elements that carry every service."""
