from pipespec.system.files import write_atomically


def test_open_file_keeps_its_content(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"before")
    with path.open("rb") as opened:
        write_atomically(path, b"after")
        assert opened.read() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]
