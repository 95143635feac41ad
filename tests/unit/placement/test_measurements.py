from dataclasses import replace

import pytest

from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.config.hosts import load_hosts
from pipespec.engine.formats.stored import KeptLayer, Storage
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.recurrence.state_sizes import RecurrentSizes
from pipespec.errors import ConfigError
from pipespec.placement.measurements import RUNTIME_BYTES, choose_dtype, unmeasured
from pipespec.placement.slices import plan_slices, split_evenly
from pipespec.system.folders import resource_dir

DEMO = resource_dir("demo")
GIB = 2**30
THREE = (
    "hosts:\n"
    "  - {name: alpha, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}\n"
    "  - {name: beta, address: 127.0.0.2, ssh: local, devices: [cpu]}\n"
    "  - {name: gamma, address: 127.0.0.3, ssh: local, devices: [cpu]}\n"
)


@pytest.fixture
def hosts_file(tmp_path):
    def write(text):
        file = tmp_path / "three.yaml"
        file.write_text(text)
        return str(file)

    return write


@pytest.fixture(scope="module")
def target():
    return inspect(DEMO / "target")


def asked(hosts_file, target, *settings, **changes):
    stages = f"cluster.stages={hosts_file.num_stages}"
    config = compose([stages, "model.context=256", *settings])
    info = replace(target, **changes)
    return unmeasured(hosts_file, config, info, inspect(DEMO / "draft"))


def test_without_limits_slices_are_even_and_hosts_as_listed(hosts_file, target):
    hosts_file = load_hosts(hosts_file(THREE))
    placement = plan_slices(asked(hosts_file, target))
    assert placement.workers_by_rank == hosts_file.workers
    assert placement.layers == tuple(split_evenly(16, 3))


def test_order_draft_split_and_spares_of_the_file_hold(hosts_file, target):
    hosts_file = load_hosts(
        hosts_file(f"{THREE}order: [gamma, beta, alpha]\ndraft: beta/0\nspares: 1\nsplit: [5, 11]")
    )
    placement = plan_slices(asked(hosts_file, target))
    assert placement.workers_by_rank == ("beta/0", "gamma/0", "alpha/0")
    assert [len(piece) for piece in placement.layers] == [5, 11]
    assert placement.spares == ("alpha/1",)


def test_devices_that_compute_together_get_as_many_layers_as_they_would_alone(hosts_file, target):
    devices = "[[cpu, cpu, cpu], cpu, cpu]"
    file = hosts_file(f"hosts: [{{name: a, address: 10.0.0.1, ssh: local, devices: {devices}}}]")
    placement = plan_slices(asked(load_hosts(file), target))
    assert placement.workers_by_rank == ("a/3", "a/0", "a/4")
    assert [len(piece) for piece in placement.layers] == [12, 4]


def test_weights_and_kv_are_counted_in_the_type_of_the_run(hosts_file, target):
    hosts_file = load_hosts(hosts_file(THREE))
    wide = asked(hosts_file, target, "model.dtype=float32").needs
    narrow = asked(hosts_file, target, "model.dtype=bfloat16").needs
    assert narrow.layer_bytes == target.stored.layers
    assert wide.layer_bytes[0] == 2 * narrow.layer_bytes[0]
    assert wide.kv_layer_bytes == tuple(2 * size for size in narrow.kv_layer_bytes)
    assert wide.draft_bytes == 2 * narrow.draft_bytes
    assert wide.runtime_bytes == RUNTIME_BYTES


def test_layers_with_a_running_state_count_it_instead_of_k_and_v(hosts_file, target):
    hosts_file = load_hosts(hosts_file(THREE))
    plain = asked(hosts_file, target, "model.dtype=float32").needs.kv_layer_bytes
    sizes = RecurrentSizes(state=1000, node=10, state_inputs=0, node_inputs=0)
    has_kv = (False, True) * 8
    hybrid = {"has_kv": has_kv, "has_state": tuple(not kv for kv in has_kv), "recurrent": sizes}
    found = asked(hosts_file, target, "model.dtype=float32", **hybrid).needs.kv_layer_bytes
    assert found[1::2] == plain[1::2]
    assert len(set(found[::2])) == 1
    assert 2 * 4000 < found[0] < plain[0]


def test_bfloat16_is_chosen_where_every_stage_has_a_gpu(hosts_file):
    gpus = THREE.replace("[cpu]", "[cuda:0]").replace("[cpu, cpu]", "[cpu, cuda:0]")
    automatic = compose([])
    assert choose_dtype(load_hosts(hosts_file(f"{gpus}draft: alpha/0")), automatic) == "bfloat16"
    assert choose_dtype(load_hosts(hosts_file(gpus)), automatic) == "float32"
    chosen = compose(["model.dtype=bfloat16"])
    assert choose_dtype(load_hosts(hosts_file(THREE)), chosen) == "bfloat16"


def test_too_little_memory_is_refused_before_anything_starts(hosts_file):
    small = hosts_file(THREE.replace("devices", "memory_gib: 0.2, devices"))
    with pytest.raises(ConfigError, match=r"draft needs .* alpha/0 has 0\.2: .* GiB are missing"):
        decide(compose([f"cluster={small}"]))


def test_a_plan_follows_the_memory_of_the_hosts(hosts_file):
    # Beside what every rank takes there is room for the embedding and a few layers only.
    tight = hosts_file(THREE.replace("name: beta", "name: beta, memory_gib: 0.505"))
    made = decide(compose([f"cluster={tight}"]))
    sizes = [len(piece) for piece in made.layers]
    assert sum(sizes) == 16
    assert sizes[1] < min(sizes[0], sizes[2])


def test_weights_of_few_bits_are_counted_in_the_bytes_that_they_keep(hosts_file, target):
    hosts_file = load_hosts(hosts_file(THREE))
    weights = 10_000
    storage = Storage(
        dequantized_from="fp8",
        kept_format="fp8",
        kept_layers=(KeptLayer(weights, weights + 40),) * target.num_layers,
    )
    found = asked(hosts_file, target, storage=storage).needs.layer_bytes
    stored = target.stored.layers  # as bfloat16
    assert found == tuple(size - 2 * weights + weights + 40 for size in stored)
    plain = asked(hosts_file, target, "model.keep_quantized=no", storage=storage).needs
    assert plain.layer_bytes == stored
    wide = asked(
        hosts_file, target, "model.dtype=float32", "model.keep_quantized=no", storage=storage
    )
    assert wide.needs.layer_bytes == tuple(2 * size for size in stored)
