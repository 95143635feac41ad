from pipespec.system.writing import write_whole


def test_who_has_opened_a_file_reads_it_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"before")
    with path.open("rb") as opened:
        write_whole(path, b"after")
        assert opened.read() == b"before"
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]
