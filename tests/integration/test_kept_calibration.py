"""What a head has learnt of its proposer, from one start to the next."""

import json
import shutil

import numpy as np
import pytest

from pipespec.system.folders import resource_dir
from tools.rig import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("proposer", ["draft_model", "suffix"])
def test_calibration_outlives_a_start_and_a_file_that_cannot_be_read(
    redis, tmp_path, monkeypatch, caplog, proposer
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo = resource_dir("demo")
    # Over links drafting surely pays.
    settings = f"proposer={proposer}", "policy.width=4", "cluster.stages=2"
    settings += ("emulate_link.latency_ms=5",)
    prompt = tuple(range(300, 320))

    def decoded() -> tuple[list[int], np.ndarray]:
        """A text, and how many draft tokens of each kind the file counts then; steps are learnt
        anew."""
        shutil.rmtree(tmp_path / "pipespec" / "step_times", ignore_errors=True)
        deployment = cluster.make_deployment(demo / "target", demo / "draft", *settings)
        ((tokens, _, _),) = cluster.decode(
            deployment, redis, [{"prompt": prompt, "max_new_tokens": 150}]
        )
        (file,) = (tmp_path / "pipespec" / "calibrations").iterdir()
        (_, depths, _), *_ = json.loads(file.read_text())
        return tokens, np.array(depths)[0]

    text, first = decoded()
    assert decoded()[0] == text
    _, second = decoded()
    assert second.sum() > 1.2 * first.sum(), "it goes on from what was counted"
    assert not caplog.messages
    (file,) = (tmp_path / "pipespec" / "calibrations").iterdir()
    file.write_text("{")
    same, third = decoded()
    assert same == text and third.sum() < 1.5 * first.sum()
    (said,) = (each for each in caplog.messages if "is ignored, as it cannot be read" in each)
    assert str(file) in said
