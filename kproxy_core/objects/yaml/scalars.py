"""The values of scalars that are not quoted."""

import re
from typing import Any

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NUMERIC = frozenset("-+.0123456789")
_number = re.compile(r"""
    ([-+]?(?:0|[1-9][0-9]{0,17}))  # as an int, like the next two
  | 0o?([0-7]{1,20})
  | 0x([0-9a-fA-F]{1,15})
  | [-+]?(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)? | [-+]?\.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN)
    """, re.VERBOSE).fullmatch
_BASES = (10, 8, 16)


def plain_value(text: str) -> Any:
    """Return the value of *text* by the core schema of YAML 1.2, and of octal numbers as in YAML 1.1."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] in _NUMERIC and (found := _number(text)):
        if found.lastindex:
            return int(found[found.lastindex], _BASES[found.lastindex - 1])
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
