"""Twenty JSON schemas: nested, enums, arrays, patterns, numbers, unions, references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
SCHEMAS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
