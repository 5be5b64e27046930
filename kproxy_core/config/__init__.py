"""Flags and the configuration file, merged into one frozen Config. No files are read but that one."""
