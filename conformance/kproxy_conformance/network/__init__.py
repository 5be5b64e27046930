"""The network that every test with packets is played in: namespaces, addresses, servers and clients.

Nothing here knows a proxy, a backend or Kubernetes.
"""
