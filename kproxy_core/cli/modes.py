"""What ``kproxy modes`` has to say about each installed backend."""

import textwrap
from dataclasses import dataclass

from kproxy_core.backend.api import BackendSettings, Description, Detection
from kproxy_core.backend.registry import Registry
from kproxy_core.cli.terms import served_families


@dataclass(frozen=True, slots=True)
class DescribedMode:
    """One mode; `detection` is None if it was not probed."""

    description: Description
    detection: Detection | None

    def as_document(self) -> dict[str, object]:
        """For JSON."""
        major, minor = self.description.contract
        document: dict[str, object] = {
            "mode": self.description.mode,
            "summary": self.description.summary,
            "preference": self.description.preference,
            "contract": f"{major}.{minor}",
        }
        if self.detection is not None:
            document["usable"] = self.detection.usable
            document["requirements"] = [
                {"what": r.what, "met": r.met, "found": r.found, "remedy": r.remedy}
                for r in self.detection.requirements
            ]
        return document

    def __str__(self) -> str:
        lines = [f"{self.description.mode:<12} {self.description.summary}"]
        if self.detection is not None:
            lines.append("  usable" if self.detection.usable else "  not usable here")
            for needed in self.detection.requirements:
                lines.append(f"  {'ok     ' if needed.met else 'missing'} {needed.what}: {needed.found}")
                if needed.remedy:
                    lines.append(textwrap.indent(needed.remedy, " " * 10))
        return "\n".join(lines)


def describe_modes(registry: Registry, *, probe: bool) -> list[DescribedMode]:
    """Every mode that can be loaded, the preferred one first; with *probe*, whether it works here."""
    settings = BackendSettings(served_families())
    return [
        DescribedMode(description, registry.detect(description.mode, settings) if probe else None)
        for description in registry.load_all()
    ]
