"""What a machine or a container may refuse to tests."""


class MissingRight(PermissionError):
    """This process may not do what a test needs, as a trial showed: the test says nothing about kproxy."""

    def __init__(self, right: str, reason: str) -> None:
        """*right* is a noun, such as ``network namespaces``."""
        super().__init__(f"needs {right}: {reason}")
        self.right = right
        self.reason = reason
