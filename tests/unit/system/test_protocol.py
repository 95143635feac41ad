"""What another version of pipespec would not understand has another protocol number."""

import json

from pipespec.system.versions import PROTOCOL, has_own_protocol, own_version
from tools.protocol_record import FILE, record

REMEDY = (
    "raise PROTOCOL in pipespec/system/versions.py, unless no version with this number was "
    "published, and run `python -m tools.protocol_record`"
)


def test_what_processes_send_to_one_another_is_that_of_the_protocol_number() -> None:
    """New fields with a default may come, as older processes leave them out."""
    known, now = json.loads(FILE.read_text()), record()
    assert known["protocol"] == now["protocol"], "run `python -m tools.protocol_record`"
    for part in ("formats", "scripts", "calls"):
        changed = {
            name for name in known[part] | now[part] if known[part].get(name) != now[part].get(name)
        }
        assert not changed, f"{part} changed: {sorted(changed)}; {REMEDY}"
    for name, fields in known["types"].items():
        own = now["types"].get(name)
        assert own is not None, f"{name} is gone; {REMEDY}"
        changed = {field for field, kind in fields.items() if own.get(field) != kind}
        assert not changed, f"{name} changed: {sorted(changed)}; {REMEDY}"
        new = {
            field
            for field, kind in own.items()
            if field not in fields and not kind.endswith("= default")
        }
        assert not new, f"{name} has new fields without a default: {sorted(new)}; {REMEDY}"


def test_version_names_the_protocol() -> None:
    assert has_own_protocol(own_version())
    other = own_version().replace(f"protocol {PROTOCOL},", f"protocol {PROTOCOL + 1},")
    assert not has_own_protocol(other)
    assert not has_own_protocol("0.1.0, code 01234567"), "from before there were protocols"
