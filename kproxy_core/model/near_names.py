"""Hints at the name that was meant, for messages about mistakes."""

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the one of the *known* names that is nearest to *name*; "" if none is near."""
    import difflib  # needed only after a mistake

    by_lower_case = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
