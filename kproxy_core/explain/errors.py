"""The error of every question. A running proxy knows it before the first question is asked."""


class NoAnswer(Exception):
    """A question that cannot be answered, with a remedy, in one line."""
