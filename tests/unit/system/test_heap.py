import pytest

from pipespec.system.heap import UNLIMITED, cgroup_free

V2 = {"memory.max": "1000\n", "memory.current": "900\n"}
V1 = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "900\n"}


@pytest.mark.parametrize(
    ("own", "folder", "files", "stat", "free"),
    [
        ("0::/a/b\n", "a/b", V2, "anon 800\nactive_file 30\ninactive_file 20\n", 150),
        ("0::/a/b\n", "a", V2, "active_file 0\n", 100),
        ("0::/\n", ".", V2, "active_file 0\n", 100),
        ("0::/a\n", "a", V2 | {"memory.max": "max\n"}, "active_file 0\n", UNLIMITED),
        ("4:cpu,memory:/a\n0::/\n", "memory/a", V1, "total_inactive_file 7\n", 107),
        ("4:memory:/gone\n", "memory", V1, "total_inactive_file 7\n", 107),
        ("3:cpu:/a\n", "cpu/a", V1, "total_inactive_file 7\n", UNLIMITED),
        ("0::/a\n", "a", V2 | {"memory.current": "2000\n"}, "active_file 1\n", 0),
    ],
)
def test_free_memory_respects_the_control_group(own, folder, files, stat, free, tmp_path):
    root = tmp_path / "cgroup"
    (root / folder).mkdir(parents=True)
    for name, text in (files | {"memory.stat": stat}).items():
        (root / folder / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cgroup_free(root, tmp_path / "own") == free
    assert cgroup_free(root, tmp_path / "missing") == UNLIMITED
