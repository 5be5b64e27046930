"""Scenarios as data, one file each; CONTRIBUTING.md says how to write one."""
