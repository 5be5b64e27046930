"""The kernel of the node, where all backends share it."""
