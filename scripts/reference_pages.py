"""Writes every page of docs/reference that comes from the code: ``python -m scripts.reference_pages``."""

from pathlib import Path

from scripts import cli_page, metrics_page, renamed_page, site_file_page


def written() -> dict[Path, str]:
    """The text of every page."""
    return {
        cli_page.PAGE: cli_page.page(),
        metrics_page.PAGE: metrics_page.page(),
        renamed_page.PAGE: renamed_page.page(),
        site_file_page.PAGE: site_file_page.page(site_file_page.PAGE.read_text()),
    }


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
