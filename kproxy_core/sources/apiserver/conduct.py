"""The conduct of an API server towards one thread that follows it: answers, failures and silences."""


class Conduct:
    """The conduct of the server as the requests for one kind have shown it."""

    def __init__(self) -> None:
        self._answers = True
        self._failures = 0
        self._sends_bookmarks = False
        self._silences = 0

    def answered(self) -> bool:
        """Record an answer, if only a refusal. Return whether it is the first after failures to answer."""
        first, self._answers = not self._answers, True
        return first

    def did_not_answer(self) -> None:
        self._answers = False

    def failed(self) -> int:
        """Record an attempt that failed. Return how many did so since one worked for a while."""
        self._failures += 1
        return self._failures

    def worked(self) -> None:
        """Record an attempt that worked for a while."""
        self._failures = 0

    def sent_bytes(self) -> None:
        self._silences = 0

    def sent_bookmark(self) -> None:
        self._sends_bookmarks = True

    def was_silent(self) -> bool:
        """Record a watch that was granted and ended in silence. Return whether its history was replaced.

        Of a history replaced by an older one, such as a backup of etcd, a server says nothing until it
        reaches the version asked for. A server that hangs grants no second watch. A server that has never
        sent a bookmark may just have nothing to say.
        """
        self._silences += 1
        return self._sends_bookmarks and self._silences > 1

    def history_replaced(self) -> None:
        """Judge silences afresh from the history that is listed next.

        Its server may be an older one, which sends no bookmarks.
        """
        self._silences = 0
        self._sends_bookmarks = False
