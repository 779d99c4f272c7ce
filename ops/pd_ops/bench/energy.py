"""Joules that this host's processors have taken, where it has a meter that may be read (Linux powercap, RAPL)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Counts from when it is made. `directory`: of the zones, one for each processor package."""

    def __init__(self, directory: Path = POWERCAP) -> None:
        self._begun: dict[Path, tuple[int, int]] = {}
        for zone in sorted(directory.glob("*-rapl:[0-9]")):
            value, most = _number(zone / "energy_uj"), _number(zone / "max_energy_range_uj")
            if value is not None and most is not None:
                self._begun[zone] = value, most

    def joules(self) -> float | None:
        """So far; None: there is no meter. A counter that has begun anew since is taken as having done so once."""
        total = 0
        for zone, (begun, most) in self._begun.items():
            value = _number(zone / "energy_uj")
            if value is None:
                return None
            total += value - begun if value >= begun else value - begun + most
        return total / 1e6 if self._begun else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
