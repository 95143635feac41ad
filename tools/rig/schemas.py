"""Twenty JSON schemas: nested, enums, arrays, patterns, numbers, unions, references."""

from __future__ import annotations

import json
from pathlib import Path

SCHEMAS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
