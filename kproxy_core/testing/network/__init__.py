"""The network that packets are tested in, which knows no proxy, no backend and nothing of Kubernetes."""
