"""The pure parts of `benchmarks.peers`: no engine is started here."""

import pytest

from benchmarks.common.run_options import TARGET
from benchmarks.peers import compare_engines
from benchmarks.peers.compare_engines import CHAT, CODE, HUGGING_FACE
from benchmarks.peers.delayed_links import LinkCheck
from benchmarks.peers.links import DRAFTING, PLAIN, Race, figures
from benchmarks.peers.python_engines import Answer, Job, Run
from pipespec.extras.bench.dataset import Sample

END = 0
CHECK = LinkCheck(10.0, 1.0, 20.1, 20.2, 24.0, 0.6)


def ran(ms_per_token: float, *texts: list[int]) -> Run:
    """A run whose first answer does not count."""
    answers = [
        Answer(text, 100.0, 100.0 + ms_per_token * (len(text) - 1)) for text in ([9, 9], *texts)
    ]
    return Run(1.0, answers, 2.0)


def race_of(**tbt: list[float]) -> Race:
    names = {"own": "pipespec", "plain": PLAIN, "drafting": DRAFTING, "longer": f"{DRAFTING} of 8"}
    runs = {names[key]: [ran(each, [1, 2, 3]) for each in values] for key, values in tbt.items()}
    return Race(CHECK, runs, dict.fromkeys(runs, 0.1))


def test_ratio_is_the_median_over_repeats_of_the_same_repeats_times() -> None:
    rows = figures(
        race_of(
            own=[10, 20, 10], plain=[100, 100, 100], drafting=[30, 40, 50], longer=[20, 40, 30]
        ),
        ran(1, [1, 2, 3]),
        [END],
    )

    own = next(row for row in rows if row["engine"] == "pipespec")
    assert own["tbt_ms"]["median"] == pytest.approx(10)
    assert own["times_llama_cpp"] == pytest.approx({"median": 10, "min": 5, "max": 10})
    assert own["times_llama_cpp_with_draft"]["median"] == pytest.approx(3)
    assert own["times_llama_cpp_with_its_best_draft"]["median"] == pytest.approx(2)
    assert own["delay_ms"] == 10.0


def test_answer_that_differs_from_the_reference_is_not_counted_as_equal() -> None:
    found = Race(
        CHECK,
        {"pipespec": [ran(1, [1, 2, END], [4, 5]), ran(1, [1, 3], [4, 5])]},
        {"pipespec": 0.1},
    )

    (row,) = figures(found, ran(1, [1, 2], [4, 5, END]), [END])

    assert (row["equal_answers"], row["answers"]) == (3, 4)


def test_figures_of_each_kind_of_prompt_are_its_own() -> None:
    samples = [Sample(str(at), kind, "text") for at, kind in enumerate([CODE, CODE, CHAT, CHAT])]
    lengths = (9, 10, 20, 30)
    job = Job(
        TARGET, TARGET, samples, [[0] * length for length in lengths], 64, 4, [0], "float32"
    )  # fmt: skip
    answers = [Answer([1, 2, 3, 4], 50.0, 50.0 + 3 * ms) for ms in (99, 10, 20, 40)]
    runs = {HUGGING_FACE: [Run(1.0, answers)], "pipespec": [Run(1.0, answers, 2.0, 300.0)]}

    rows = compare_engines.figures(job, runs, [END])

    found = [(each["kind"], each["engine"], each["tbt_ms"]["median"]) for each in rows]
    assert found == [
        (kind, engine, pytest.approx(ms))
        for kind, ms in ((CODE, 10), (CHAT, 30))
        for engine in runs
    ]
    assert rows[-1]["prompt_tokens_per_s"]["median"] == pytest.approx(25 / 0.05)
    assert (rows[-1]["memory_mib"]["median"], rows[0]["memory_mib"]) == (300, None)
    assert "1.00" in str(compare_engines.cells(rows[-1]))
