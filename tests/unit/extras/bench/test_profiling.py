import pytest

from pipespec.config.compose import compose
from pipespec.errors import ConfigError
from pipespec.extras.bench.profiling import check, plain_config
from pipespec.head.policies.root import Root


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["proposer=suffix"], "but the proposer has none"),
        (["proposer=hybrid"], "what a draft model proposes by itself"),
        (["policy=root"], "leave policy out"),
        (["sampling.temperature=1"], "leave sampling.temperature out"),
    ],
)
def test_what_cannot_be_profiled_is_refused(settings: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(compose(settings))
    assert part in str(refused.value)


def test_a_draft_model_is_profiled_also_where_it_waits_for_the_stages() -> None:
    settings = ["cluster.stages=2", "policy.width=8", "proposer.overlap=no"]
    check(compose(settings))
    plain = plain_config(settings)
    assert (plain.policy, plain.cluster.stages) == (Root(), 2)
