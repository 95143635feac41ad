"""Verdicts on their way through Redis."""

from hypothesis import given
from hypothesis import strategies as st

from pipespec.controller import verdict_exchange
from pipespec.core import GRAMMAR, NO_MEMORY, NOT_FINITE, TokenLogprobs, Verdict

TOKENS = st.integers(0, 200_000)
LOGPROBS = st.builds(
    TokenLogprobs,
    st.floats(-1e3, 0),
    st.lists(st.tuples(TOKENS, st.floats(-1e3, 0)), max_size=4).map(tuple),
)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    tokens = tuple(draw(st.lists(TOKENS, max_size=5)))
    size = len(tokens) if draw(st.booleans()) else 0
    reports = tuple(draw(st.lists(LOGPROBS, min_size=size, max_size=size)))
    sequence, base = draw(st.integers(1, 2**40)), draw(st.integers(0, 2**20))
    return Verdict(
        sequence,
        base,
        tokens,
        reports,
        draw(st.sampled_from([None, GRAMMAR, NOT_FINITE, NO_MEMORY])),
    )


@given(st.lists(verdicts(), max_size=4), st.integers(0, 2**62))
def test_verdicts_arrive_as_they_left(sent, drawn_ns):
    assert verdict_exchange.unpack_verdicts(verdict_exchange.pack_verdicts(sent, drawn_ns)) == (
        sent,
        drawn_ns,
    )
