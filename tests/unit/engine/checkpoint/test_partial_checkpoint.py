from pipespec.engine.formats.slice_tensors import described, parts_of


def test_parts_are_described_in_words():
    assert described({"0", "1", "2", "5", "embedding"}) == "layers 0 to 2 and 5 and embedding"
    assert described({"7"}) == "layer 7"
    assert described({"head", "embedding"}) == "embedding and head"
    assert parts_of(range(2), 4, tied=True) == {"0", "1", "embedding"}
    assert parts_of(range(2, 4), 4, tied=True) == {"2", "3", "embedding", "head"}
    assert parts_of(range(2, 4), 4, tied=False) == {"2", "3", "head"}
