"""The files of the page, under addresses that change with them."""

import hashlib
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parent / "page"
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> tuple[dict[str, bytes], str]:
    """Return the page's files by name, and their digest. Their addresses include it: a browser asks for each once."""
    files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}
    release = hashlib.sha256(b"".join(files.values())).hexdigest()[:12]
    return {name: text.replace(b'"/static/', f'"/static/{release}/'.encode()) for name, text in files.items()}, release
