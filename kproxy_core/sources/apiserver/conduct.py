"""The conduct of an API server towards one thread that follows it: answers, failures and silences."""

from msgspec import Struct


class Conduct(Struct):
    """The conduct of the server as the requests for one kind have shown it."""

    answers: bool = True
    """False after a request without an answer, until one is answered, if only with a refusal."""
    failures: int = 0
    """Attempts that failed since one worked for a while."""
    announces_progress: bool = False
    """It sent a bookmark with a version newer than that of the last object.

    With etcd 3.4, which does not report its progress, the bookmarks of an API server repeat the version
    of the last object, and a watch resumed from that version gets none.
    """
    silences: int = 0
    """Watches, one after the other, that were granted and ended in silence."""

    @property
    def hides_history(self) -> bool:
        """Return whether the silences mean that the history was replaced by an older one.

        Of such a history, for example from a backup of etcd, a server says nothing until it reaches the
        version asked for. A server that hangs grants no second watch. A server that has never announced
        progress may just have nothing to say.
        """
        return self.announces_progress and self.silences > 1

    def forget_history(self) -> None:
        """Judge silences afresh from the history that is listed next.

        Its server may be an older one, which announces no progress.
        """
        self.silences = 0
        self.announces_progress = False
