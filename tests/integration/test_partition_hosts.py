"""`pipespec partition` over SSH: every host measures itself, and the links enter the plan."""

import json
import sys

import pytest
import yaml

from tools.rig.testbed import Testbed, missing

DELAY_MS = 5.0
NUM_LAYERS = 16

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)


@pytest.fixture(scope="module")
def bed():
    with Testbed(hosts=2, delay_ms=DELAY_MS, gbit=1.0) as bed:
        yield bed


@pytest.fixture(scope="module")
def hosts_file(bed):
    """Two workers on the first host and one on the second; figures are kept in the bed's folder."""
    file = bed.hosts_file(devices={"a": 2, "b": 1})
    hosts_file = yaml.safe_load(file.read_text())
    hosts_file["defaults"]["env"]["XDG_CACHE_HOME"] = str(bed.folder / "cache")
    file.write_text(yaml.safe_dump(hosts_file))
    return file


def partition(bed, *arguments):
    command = [sys.executable, "-m", "pipespec", "partition", *map(str, arguments)]
    return bed.run("a", command, timeout=150)


@pytest.mark.long
def test_hosts_measure_themselves_and_links_count(bed, hosts_file):
    done = partition(bed, "--json", hosts_file, "policy.width=8")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    figures = answer["figures"]
    assert set(figures["members"]) == {"a/0", "a/1", "b/0"}
    for link in figures["links"]:
        assert 2 * DELAY_MS <= link["rtt_ms"] < 6 * DELAY_MS
        assert 0 < link["gbit_s"] < 1.05
    assert sum(answer["hosts"]["split"]) == NUM_LAYERS
    # Three ranks on two hosts cross the link there and back.
    links = [row["link_ms"] for row in answer["ranks"]]
    assert sum(ms >= DELAY_MS for ms in links) == 2
    kept = [file.parent.name for file in (bed.folder / "cache").rglob("*.json")]
    assert kept.count("measured") == 2  # a stage and a draft


@pytest.mark.long
def test_a_host_that_is_cut_off_is_named(bed, hosts_file):
    bed.cut("a", "b")
    try:
        done = partition(bed, hosts_file)
    finally:
        bed.mend("a", "b")
    assert done.returncode == 1
    assert done.stderr.startswith("pipespec: b: ")
    assert "Traceback" not in done.stderr
