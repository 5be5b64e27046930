"""The running proxy, assembled from the other rooms, and its answers."""
