"""The configuration file: KubeProxyConfiguration ``kubeproxy.config.k8s.io/v1alpha1``."""

from dataclasses import dataclass
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing that is wrong with the configuration."""

    option: str
    """The flag (``--mode``) or the path of the field (``nftables.syncPeriod``)."""
    value: object
    problem: str

    def __str__(self) -> str:
        return f"{self.option}: {self.value!r}: {self.problem}"


class ConfigError(Exception):
    """The configuration can't be used."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class FileConfig:
    """A decoded file, with what its author should be told (``notices``)."""

    notices: tuple[str, ...]


def load(path: str) -> FileConfig:
    """Read and decode the file *path*, YAML or JSON. Raises ConfigError naming every wrong field."""
    raise NotImplementedError
