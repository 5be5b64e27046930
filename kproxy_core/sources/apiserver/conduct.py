"""The conduct of an API server towards one thread that follows it: answers, failures and silences."""


class Conduct:
    """The conduct of the server as the requests for one kind have shown it."""

    def __init__(self) -> None:
        self._answers = True
        self._failures = 0
        self._announces_progress = False
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

    def announced_progress(self) -> None:
        """Record a bookmark with a version newer than that of the last object.

        With etcd 3.4, which does not report its progress, the bookmarks of an API server repeat the version
        of the last object, and a watch resumed from that version gets none.
        """
        self._announces_progress = True

    def was_silent(self) -> bool:
        """Record a watch that was granted and ended in silence. Return whether its history was replaced.

        Of a history replaced by an older one, such as a backup of etcd, a server says nothing until it
        reaches the version asked for. A server that hangs grants no second watch. A server that has never
        announced progress may just have nothing to say.
        """
        self._silences += 1
        return self._announces_progress and self._silences > 1

    def history_replaced(self) -> None:
        """Judge silences afresh from the history that is listed next.

        Its server may be an older one, which announces no progress.
        """
        self._silences = 0
        self._announces_progress = False
