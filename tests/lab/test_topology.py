from __future__ import annotations

import pytest

from thinwire.errors import UsageError
from thinwire.lab.environment import gpus_of_host, rank_environment, visible_gpus
from thinwire.lab.topology import LabSpec, plan_topology


def test_hosts_ranks_and_names() -> None:
    topology = plan_topology(LabSpec(hosts=2, rate=["1gbit", "host2=5mbit"], ranks_per_host=2))
    assert [host.name for host in topology.hosts] == ["host1", "host2"]
    assert [host.rate for host in topology.hosts] == [10**9, 5 * 10**6]
    assert [(r.rank, r.local_rank, r.host.name) for r in topology.ranks()] == [
        (0, 0, "host1"),
        (1, 1, "host1"),
        (2, 0, "host2"),
        (3, 1, "host2"),
    ]
    assert all(name.startswith(f"{topology.name}-") for name in topology.namespaces)
    assert len({*topology.namespaces}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 251}, "from 1 to 250"),
        ({"hosts": 2.5}, "hosts is 2.5"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0"),
        ({"rate": "fast"}, 'rate is "fast"'),
        ({"local_rate": "fast"}, "local_rate is"),
        ({"latency": "far"}, "latency is"),
    ],
)
def test_a_wrong_spec_is_one_sentence(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        LabSpec(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_names_and_networks_of_other_labs_are_avoided() -> None:
    spec = LabSpec()
    names: set[str] = set()
    networks: set[str] = set()
    for _ in range(50):
        topology = plan_topology(spec, names, networks)
        assert topology.name not in names
        assert topology.network not in networks
        names.add(topology.name)
        networks.add(topology.network)


def test_each_rank_is_told_where_it_is() -> None:
    topology = plan_topology(LabSpec(hosts=2, ranks_per_host=2))
    rank = topology.ranks()[3]
    env = rank_environment(topology, rank, 29500, base={"HOME": "/here", "RANK": "9"})
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": topology.hosts[0].address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "HOME": "/here",
    }
    assert expected.items() <= env.items()
    assert (
        rank_environment(topology, rank, 1, base={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    )


@pytest.mark.parametrize(("share_gpu", "identities"), [(False, 2), (True, 4)])
def test_nccl_sees_one_machine_per_host_or_one_per_rank(share_gpu: bool, identities: int) -> None:
    topology = plan_topology(LabSpec(hosts=2, ranks_per_host=2, share_gpu=share_gpu))
    found = {
        rank_environment(topology, rank, 1, base={})["NCCL_HOSTID"] for rank in topology.ranks()
    }
    assert len(found) == identities


def test_gpus_are_dealt_to_ranks_in_turn() -> None:
    topology = plan_topology(LabSpec(hosts=2, ranks_per_host=2))
    four, two = ["0", "1", "2", "3"], ["4", "6"]
    assert [gpus_of_host(four, topology, host) for host in (0, 1)] == [["0", "1"], ["2", "3"]]
    assert [gpus_of_host(two, topology, host) for host in (0, 1)] == [["4", "6"], ["4", "6"]]
    assert gpus_of_host(["0"], topology, 1) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, 6"}) == ["4", "6"]
