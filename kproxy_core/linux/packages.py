"""Python packages that kproxy may be installed without: of its extras, and bindings of the distribution."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import kproxy_core
from kproxy_core.linux import programs

_OF_THE_DISTRIBUTION: Final = "/usr/bin/python3"
_MODULES: Final = {"protobuf": "google.protobuf", "websocket-client": "websocket"}
"""Modules of packages with another name."""


def is_installed(package: str) -> bool:
    try:
        return find_spec(_MODULES.get(package, package)) is not None
    except ImportError:  # of a parent
        return False


def lacking(extra: str, *packages: str) -> str:
    """Return which of *packages* are missing, and what installs the *extra* that has them; "" if none is."""
    missing = [package for package in packages if not is_installed(package)]
    if not missing:
        return ""
    named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    return f"needs the package{'s' * (len(missing) > 1)} {named}: {installing(extra)}"


def installing(extra: str) -> str:
    """Return the command that installs *extra*.

    With the version, because a package index may have another project by the name of kproxy.
    """
    return f"pip install 'kproxy[{extra}]=={kproxy_core.__version__}'"


def interpreters(binding: str) -> list[str]:
    """Return the Pythons that may have *binding*: this one if it has, and the distribution's."""
    found = find_spec(binding)
    own = [sys.executable] if found is not None and found.origin else []
    return [*own, *([_OF_THE_DISTRIBUTION] if Path(_OF_THE_DISTRIBUTION).exists() else [])]


def remedy(debian: str, fedora: str) -> str:
    """Return what to do about a missing package of the distribution, by its names."""
    for manager, package in (("apt-get", debian), ("dnf", fedora)):
        if programs.find(manager):
            return f"as root: {manager} install {package}"
    return f"install {debian}"
