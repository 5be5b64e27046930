"""What can go wrong between a user and the nodes of a cluster. Each error is one line for the user."""


class NoCluster(Exception):
    """The API server cannot be used: the kubeconfig, the connection, or its answers."""


class BadKubeconfig(NoCluster):
    """The kubeconfig or its context cannot be used."""


class Forbidden(Exception):
    """RBAC refuses a request of the user."""

    def __init__(self, verb: str, resource: str, namespace: str = "") -> None:
        where = f" in namespace {namespace}" if namespace else ""
        super().__init__(
            f"the API server refuses this: you need the verb {verb!r} on {resource!r}{where};"
            f" deploy/user-rbac.yaml has a role with all that `kubectl kproxy` needs")
        self.verb = verb
        self.resource = resource
        self.namespace = namespace


class Unreached(Exception):
    """One node did not answer, or not as its kproxy should."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node
        self.why = why
