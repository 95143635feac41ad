"""What two hosts of a cluster send each other, as somebody on the cable between them sees it."""

import struct

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from tests.helpers.redis_tls import captured
from tools.rig.driver import PROMPT, Driver
from tools.rig.testbed import Testbed, missing

TOKENS = 32
GREEDY = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=0"]
SAMPLED = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=1", "sampling.seed=7"]


@pytest.mark.long
def test_eavesdropper_between_hosts_reads_nothing_of_sealed_batches() -> None:
    """Rows hold a token and its position; the text is the same either way."""
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    prompt = ModelInfo.of(decide(compose(["cluster.devices=[cpu]"]))).encode(PROMPT)
    texts, readable = {}, {}
    with Testbed(hosts=2, delay_ms=0.1, gbit=10) as bed:
        for seal in ("auto", "no"):
            driver = Driver(bed, {"a": 2, "b": 2}, f"transport.seal={seal}")
            driver.ask(GREEDY)  # ranks that have joined may not be linked yet
            with captured(bed, "b") as packets:
                texts[seal] = [driver.ask(GREEDY), driver.ask(SAMPLED)]
            seen = b"".join(packets)
            assert b"EVALSHA" not in seen, "as every rank says it to Redis in every step"
            rows = enumerate(texts[seal][0][:-1], len(prompt))
            readable[seal] = sum(struct.pack("<qq", token, at) in seen for at, token in rows)
            assert driver.end() == 0
    assert texts["auto"] == texts["no"]
    assert readable["auto"] == 0
    assert readable["no"] > TOKENS / 2, "the test would not see them"
