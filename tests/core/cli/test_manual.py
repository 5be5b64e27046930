"""The pages of the manual say what the help of the commands says."""

from deploy.manual import PAGES, pages


def test_the_pages_are_those_of_the_commands() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()}
    assert kept == dict(pages()), "run `make man`"
