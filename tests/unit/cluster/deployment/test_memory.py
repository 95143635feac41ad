"""What a deployment asks of memory, beside what a loaded model takes."""

import re
import resource
from contextlib import nullcontext
from dataclasses import replace

import pytest

from pipespec.cluster.decide import decide, require_room
from pipespec.cluster.deployment.deployment import Deployment
from pipespec.cluster.deployment.memory import (
    SLOT_BYTES,
    WEIGHTS,
    bytes_by_rank,
    free_bytes,
    kv_slots,
    kv_tokens,
    local_ranks,
    recurrent_bytes,
    require_files,
    require_memory,
    required_bytes,
    slot_bytes,
)
from pipespec.cluster.ranks import rank_components
from pipespec.config.compose import compose
from pipespec.config.hosts import this_machine
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.tensor_parallel.tp_member import TPMember
from pipespec.errors import ConfigError
from pipespec.placement.measurements import num_slots
from pipespec.system.liveness import progress
from tests.helpers import few_bits, models


def planned(*settings: str) -> Deployment:
    return decide(compose(["cluster.stages=2", "cluster.devices=[cpu]", *settings]))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_and_weights_are_those_of_a_loaded_model(rank, dtype):
    deployment = planned(
        f"model.dtype={dtype}",
        "model.context=64",
        "policy.width=2",
        "policy.children=2",
        "scheduler.max_num_seqs=1",
    )
    before = progress.num_loaded
    model = rank_components.load_model(deployment, rank)
    assert progress.num_loaded - before == bytes_by_rank(deployment)[rank] == model.num_weight_bytes
    wanted = required_bytes(deployment, rank)
    info = deployment.target if rank else deployment.draft
    copied = info.loaded(dtype, None) != info.stored
    assert wanted[WEIGHTS] == (model.num_weight_bytes if copied else 0)
    slots = num_slots(deployment.config, context=64, num_ranks=3, head=rank == 0)
    pool = model.num_kv_bytes + slots * SLOT_BYTES
    beside = wanted.total() - wanted[WEIGHTS] - pool
    assert 0 <= beside < pool  # a batch and a tree of a few nodes
    assert wanted["model.context"] == model.num_kv_bytes * 64 // slots + 64 * SLOT_BYTES


@pytest.mark.parametrize(
    ("size", "rank"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_weights_and_slots_of_members_are_those_of_their_parts(size, rank):
    """Each of four has one of four query heads, of two KV heads."""
    settings = ("model.dtype=bfloat16", "model.context=64", "scheduler.max_num_seqs=1")
    group = (f"cluster.tensor_parallel={size}", "cluster.draft_tensor_parallel=1")
    deployment = planned(*group, *settings)
    whole = rank_components.load_model(planned(*settings), rank)
    slot = slot_bytes(deployment, deployment.target, rank) - SLOT_BYTES
    for member in range(size):
        part = rank_components.load_model(deployment, rank, part=TPMember(member, size))
        assert required_bytes(deployment, rank)[WEIGHTS] == part.num_weight_bytes
        assert slot * part.num_slots == part.num_kv_bytes
        assert part.num_weight_bytes < whole.num_weight_bytes


def test_every_member_counts_on_its_device():
    deployment = planned("cluster.tensor_parallel=2", "model.context=64", "model.dtype=bfloat16")
    wanted = 2 * (required_bytes(deployment, 1) + required_bytes(deployment, 2)).total()
    require_memory(deployment, [1, 2], lambda _: wanted)
    with pytest.raises(ConfigError, match="on cpu"):
        require_memory(deployment, [1, 2], lambda _: wanted - 1)


def test_graphs_of_layers_with_a_running_state_reserve_nodes():
    path = models.shared("qwen3_next")
    few = ("policy.width=2", "policy.children=2", "scheduler.max_num_seqs=1", "model.context=64")

    def reserved(device: str, graph_rows: str) -> int:
        deployment = planned(
            f"model.target={path}", f"model.draft={path}", f"model.graph_rows={graph_rows}", *few
        )
        deployment = replace(deployment, devices=(device,) * 3)
        return recurrent_bytes(deployment, deployment.target, 1)

    assert reserved("cpu", "[64]") == reserved("cuda:0", "[]") < reserved("cuda:0", "[8]")
    assert reserved("cuda:0", "[8]") < reserved("cuda:0", "[8,64]")


def test_kv_slots_fit_memory_between_one_sequence_and_max_num_seqs():
    deployment = planned("model.context=100", "scheduler.max_num_seqs=5", "model.dtype=float32")
    info = deployment.target
    least = num_slots(deployment.config, context=100, num_ranks=3, head=False)
    slot = slot_bytes(deployment, info, 1)
    assert kv_slots(deployment, 1, 0) == least, "one sequence always"
    free = required_bytes(deployment, 1)[WEIGHTS] + 2 * (least + 150) * slot
    assert kv_slots(deployment, 1, free) == least + 150, "half of what the weights leave"
    assert kv_slots(deployment, 1, 10**12) == least + 400, "no more than can be used"
    assert kv_tokens(deployment, 1, least) == 100
    assert kv_tokens(deployment, 0, kv_slots(deployment, 0, 10**12)) == 500


def test_kv_memory_as_an_amount_ignores_free_memory_and_must_hold_one_sequence():
    settings = ("model.context=100", "scheduler.max_num_seqs=50", "model.dtype=float32")
    plain = planned(*settings)
    least = num_slots(plain.config, context=100, num_ranks=3, head=False)
    wanted = 8 * 2**20
    assert wanted < (least + 4900) * slot_bytes(plain, plain.target, 1)
    given = planned(*settings, "model.kv_memory=8MiB")
    slots = kv_slots(given, 1, free=0)
    assert slots == wanted // slot_bytes(plain, plain.target, 1)
    assert required_bytes(given, 1).total() - required_bytes(plain, 1).total() == pytest.approx(
        (slots - least) * slot_bytes(plain, plain.target, 1)
    )
    with pytest.raises(ConfigError, match=r"kv_memory is 4KiB, but rank 1 needs .* 100 tokens"):
        require_memory(planned(*settings, "model.kv_memory=4KiB"), [1])


def test_a_source_without_a_draft_needs_none_on_the_head():
    assert required_bytes(planned("proposer=suffix"), 0).total() == 0


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (["policy.capacity=1048576"], "policy.capacity"),
        (["policy.width=4096", "policy.capacity=8192"], "policy.width"),
        (["decode.prefill_chunk=65536"], "decode.prefill_chunk"),
        (["model.dtype=bfloat16", "scheduler.max_num_seqs=32", "policy.width=16"], "model.context"),
    ],
)
def test_too_little_memory_is_refused_with_the_largest_consumer(settings, setting):
    deployment = planned(*settings)
    ranks = local_ranks(deployment)
    wanted = sum(required_bytes(deployment, rank).total() for rank in ranks)
    assert ranks == [0, 1, 2]
    require_memory(deployment, ranks, lambda device: wanted)
    with pytest.raises(ConfigError, match=rf"GiB on cpu, .* for {setting}, .* lower {setting}"):
        require_memory(deployment, ranks, lambda device: wanted - 1)


def test_weights_that_do_not_fit_name_the_first_setting_with_which_they_do():
    plain = planned("model.context=64", "model.dtype=float32")
    small = planned("model.context=64", "model.dtype=bfloat16")
    enough = required_bytes(small, 1).total() + bytes_by_rank(small)[1]  # these are mapped
    for room, remedy in (
        (enough, "set model.dtype=bfloat16, with which they fit"),
        (enough - 1, "set model.quantization=nf4, with which they fit"),
        (0, "use more hosts or devices, or a smaller model"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"free; {remedy}.")):
            require_memory(plain, [1], lambda device, room=room: room)


def test_files_of_few_bits_that_are_too_large_are_refused_by_size_alone(tmp_path, monkeypatch):
    path = few_bits.make(tmp_path, "Q4_0", "llama", hidden_size=64)
    config = compose([f"model.target={path}", "proposer=suffix", "cluster.stages=1"])
    deployment = decide(config)
    held = sum(each.num_bytes for each in deployment.target.storage.kept_layers)
    least = open_files(path).least_bytes()
    assert 0 < least <= held <= required_bytes(deployment, 1)[WEIGHTS]
    monkeypatch.setattr("pipespec.engine.formats.gguf.GgufFiles._read", None)
    for free, refused in ((least, False), (least - 1, True)):
        monkeypatch.setattr("pipespec.cluster.decide.free_bytes", lambda _, free=free: free)
        with pytest.raises(ConfigError, match="GiB on cpu") if refused else nullcontext():
            require_room(config)


def test_device_of_a_hosts_file_that_this_machine_lacks_is_refused(tmp_path):
    file = tmp_path / "hosts.yaml"
    host = "{name: a, address: 127.0.0.1, ssh: local, devices: [cuda:98, cuda:99]}"
    file.write_text(f"hosts: [{host}]\n")
    deployment = decide(compose([f"cluster={file}"]))
    with pytest.raises(ConfigError, match=r"to compute on cuda:99, but this machine has \d+ CUDA"):
        require_memory(deployment, [1])


def test_more_memory_than_any_machine_has_is_refused():
    deployment = replace(planned(), context=10**12)
    with pytest.raises(ConfigError, match=r"model\.context"):
        require_memory(deployment, [1])
    assert 0 < free_bytes("cpu") < 10**15


def test_ranks_of_other_hosts_are_not_counted_here():
    deployment = planned()
    far = replace(this_machine(["cpu"] * 3), name="local", ssh=None)
    assert local_ranks(replace(deployment, hosts=(far,))) == []


@pytest.mark.parametrize(("stages", "least"), [(1, 43), (4, 55), (8, 71)])
def test_too_low_limit_of_open_files_is_refused_with_the_number_needed(stages, least):
    """With one less than `least`, runs of so many stages were seen to fail."""
    deployment = planned(f"cluster.stages={stages}")
    require_files(deployment, least)
    require_files(deployment, resource.RLIM_INFINITY)
    with pytest.raises(ConfigError, match=rf"may open {least - 1} files, but {least} .*ulimit -n"):
        require_files(deployment, least - 1)
    elsewhere = planned(f"cluster.stages={stages}", "controller.url=redis://host")
    require_files(elsewhere, least - 5)
    with pytest.raises(ConfigError, match="ulimit -n"):
        require_files(elsewhere, least - 6)
