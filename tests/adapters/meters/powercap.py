"""A powercap tree on disk: the files that the kernel shows, and nothing else."""

from pathlib import Path


class Powercap:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def zone(self, folder: str, name: str, energy_uj: int = 0, range_uj: int = 262_143_328_850) -> Path:
        """Top-level zones lie flat; a subzone lies in its parent, and flat under its own name as a link, as in /sys."""
        parent = folder.rpartition(":")[0]
        inside = self.root / parent / folder if folder.count(":") > 1 else self.root / folder
        inside.mkdir(parents=True)
        (inside / "name").write_text(f"{name}\n")
        (inside / "max_energy_range_uj").write_text(f"{range_uj}\n")
        (inside / "energy_uj").write_text(f"{energy_uj}\n")
        if folder.count(":") > 1:
            (self.root / folder).symlink_to(inside)
        return inside

    def set(self, folder: str, energy_uj: int | str) -> None:
        (self.root / folder / "energy_uj").write_text(f"{energy_uj}\n")
