"""Files of tasks."""

import json
from pathlib import Path


def written(path: Path, *numbers: int, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"question": f"{number}?", "answer": str(number)}) for number in numbers]
    path.write_text("\n".join(rows) + end)
    return path
