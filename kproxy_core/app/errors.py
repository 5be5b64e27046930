"""What can go wrong in the running proxy and in requests to it. Each error is one line for the operator."""


class NoAnswer(Exception):
    """A question that cannot be answered, with a remedy."""


class RequestRefused(Exception):
    """A request that was not fulfilled."""


class Misused(NoAnswer, RequestRefused):
    """A question or request that is wrong in itself, whatever the state of the node: the caller's mistake."""


class NoProxy(Exception):
    """No proxy that can be trusted runs in this network namespace."""


class RestartNeeded(Exception):
    """The proxy has ended, and must be started again to follow its configuration."""
