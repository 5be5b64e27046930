"""Input and output of the mode in the proxy's process. Decides nothing about what to open or write."""
