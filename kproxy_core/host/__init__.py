"""The node as all backends share it: programs, sysctls, modules, privileges. Nothing about one backend."""
