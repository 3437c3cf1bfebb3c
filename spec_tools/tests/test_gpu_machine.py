"""Facts and warnings of the GPU kit, from recorded output of ``nvidia-smi`` and ``dmesg``."""

from __future__ import annotations

import stat
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tools.gpu import machine, nvidia_smi, remarks
from spec_tools.gpu.nvidia_smi import FIELDS
from spec_tools.gpu.platforms import CPU, CUDA, Platform

pytestmark = [pytest.mark.spec("KIT-11"), pytest.mark.pure]

VALUES = {
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "580.65.06",
    "memory.total": "81559 MiB",
    "memory.free": "81040 MiB",
    "compute_mode": "Default",
    "persistence_mode": "Enabled",
    "mig.mode.current": "Disabled",
    "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.corrected.volatile.total": "0",
    "temperature.gpu": "34",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "pcie.link.gen.current": "5",
    "pcie.link.width.current": "16",
}
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-51,104-155\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t52-103,156-207\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
NVLINK = textwrap.dedent("""\
    GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6c1f5b7a-0000-0000-0000-000000000000)
    \t Link 0: 26.562 GB/s
    \t Link 1: 26.562 GB/s
    GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0d3e5b7a-0000-0000-0000-000000000000)
    \t Link 0: 26.562 GB/s
    \t Link 1: <inactive>
    """)
DMESG = textwrap.dedent("""\
    [    4.1] nvidia: loading out-of-tree module taints kernel.
    [ 2812.7] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
    [ 2900.0] NVRM: Xid (PCI:0000:43:00): 13, pid=4711, name=train.py, Graphics Exception: ESR 0x504730=0x10003
    """)


class Machine:
    """Answers like the commands of a machine with two GPUs."""

    def __init__(self, *changes: dict[str, str], dmesg: str | None = "", apps: str = "", unknown: str = "") -> None:
        self.changes = changes or ({}, {})
        self.unknown = unknown
        self.answers: dict[str, str | None] = {"topo": TOPOLOGY, "nvlink": NVLINK, "dmesg": dmesg, "apps": apps}

    def __call__(self, words: Sequence[str]) -> str | None:
        text = " ".join(words)
        if "--query-gpu=" in text:
            return self.gpus(words[1].partition("=")[2].split(","))
        return next((answer for name, answer in self.answers.items() if name in text), None)

    def gpus(self, fields: Sequence[str]) -> str:
        if self.unknown in fields:
            return f'Field "{self.unknown}" is not a valid field to query.\n\n'
        rows = [
            VALUES | {"index": str(index), "pci.bus_id": f"00000000:{index + 1}B:00.0"} | change
            for index, change in enumerate(self.changes)
        ]
        return "".join(", ".join(row[field] for field in fields) + "\n" for row in rows)


def look(ask: Any, root: Path, environment: dict[str, str] | None = None, platform: Platform = CPU) -> dict[str, Any]:
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    return machine.look(platform, ask, environment or {}, root)


def warned(facts: dict[str, Any]) -> dict[str, str]:
    """The texts of the warnings, except those about this real machine."""
    return {one["about"]: one["text"] for one in remarks.warnings(facts) if one["about"] != "open files"}


def test_healthy_machine_has_all_facts_and_one_warning(tmp_path: Path) -> None:
    facts = look(Machine(), tmp_path)
    assert facts["gpus"][1] == {FIELDS[name]: value for name, value in VALUES.items()} | {
        "index": "1",
        "bus": "00000000:2B:00.0",
    }
    assert facts["topology"]["connections"] == {
        "GPU0": {"GPU1": "NV18", "NIC0": "PIX"},
        "GPU1": {"GPU0": "NV18", "NIC0": "SYS"},
        "NIC0": {"GPU0": "PIX", "GPU1": "SYS"},
    }
    assert facts["topology"]["text"].splitlines()[1] == "GPU0\t X \tNV18\tPIX\t0-51,104-155\t0\t\tN/A"
    assert (facts["nvlinks"], facts["xid"], facts["processes"], facts["mps"]) == ([2, 1], None, [], False)
    assert facts["shared_memory"]["MiB"] >= facts["shared_memory"]["free MiB"]
    assert warned(facts) == {"NVLink": "the GPUs have different numbers of active NVLinks: 2, 1"}
    lines = machine.lines(facts)
    assert lines[0].startswith("GPU 0: memory 81559 MiB, free memory 81040 MiB, compute mode Default")
    assert "active NVLinks by GPU: 2, 1" in lines
    assert "XID errors in the kernel's log: not readable" in lines


def test_machine_without_nvidia_smi_has_the_other_facts(tmp_path: Path) -> None:
    facts = look(lambda words: None, tmp_path)
    assert facts["gpus"] == facts["nvlinks"] == facts["processes"] == facts["peer_access"] == []
    assert facts["topology"] == {}
    assert "locked memory" in facts["limits"]
    assert machine.lines(facts)[0] == "nvidia-smi gives no answer here"
    assert warned(facts) == {}


@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        ({"compute_mode": "Exclusive_Process"}, "compute mode", "it refuses a second process"),
        ({"mig.mode.current": "Enabled"}, "MIG", "GPU 1 is divided by MIG"),
        ({"clocks_throttle_reasons.active": "0x0000000000000041"}, "throttling", "temperature limit of hardware"),
        ({"persistence_mode": "Disabled"}, "persistence", "is off"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "ECC", "3 uncorrected memory errors"),
        ({"temperature.gpu": "91"}, "temperature", "GPU 1 has 91 degrees"),
    ],
)
def test_gpu_in_a_bad_state_has_a_warning(change: dict[str, str], about: str, text: str, tmp_path: Path) -> None:
    found = warned(look(Machine({}, change), tmp_path))
    assert set(found) == {about, "NVLink"}
    assert text in found[about]
    # Values that the GPU does not support have no meaning.
    missing = dict.fromkeys(change, "[N/A]")
    assert set(warned(look(Machine({}, missing), tmp_path))) == {"NVLink"}


def test_throttle_reasons_of_an_idle_gpu_are_harmless() -> None:
    assert nvidia_smi.throttle_reasons("0x0000000000000003") == []
    assert nvidia_smi.throttle_reasons("0x000000000000000C") == ["power cap by software", "slowdown by hardware"]
    assert nvidia_smi.throttle_reasons("[Not Supported]") == []


def test_field_that_the_driver_does_not_know_is_left_out() -> None:
    (gpu,) = nvidia_smi.gpus(Machine({}, unknown="clocks_throttle_reasons.active"))
    assert "throttle reasons" not in gpu
    assert gpu["PCIe width"] == "16"
    assert nvidia_smi.gpus(lambda words: 'Field "another" is not a valid field to query.') == []


def test_xid_errors_have_no_name_of_a_process(tmp_path: Path) -> None:
    facts = look(Machine(dmesg=DMESG), tmp_path)
    assert facts["xid"] == [
        "GPU 0000:1b:00: Xid 79, GPU has fallen off the bus.",
        "GPU 0000:43:00: Xid 13, Graphics Exception: ESR 0x504730=0x10003",
    ]
    assert [one["text"] for one in remarks.warnings(facts) if one["about"] == "XID"] == [
        f"the driver has reported an error: {line}" for line in facts["xid"]
    ]
    assert "XID errors in the kernel's log: 2 lines" in machine.lines(facts)
    assert look(Machine(dmesg="[1.0] hello\n"), tmp_path)["xid"] == []


def test_processes_of_others_are_counted_without_names(tmp_path: Path) -> None:
    apps = "00000000:2B:00.0, 4000\n00000000:2B:00.0, [N/A]\n00000000:99:00.0, 5\n"
    facts = look(Machine(apps=apps), tmp_path)
    assert facts["processes"] == [{"GPU": "1", "processes": 2, "MiB": 4000}]
    assert warned(facts)["other processes"] == "2 processes use GPU 1, with 4000 MiB"


def test_missing_peer_access_names_the_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Platform, "num_devices", lambda self: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: 2 not in (i, j))
    facts = look(Machine(), tmp_path, platform=CUDA)
    assert facts["peer_access"] == [[True, True, False], [True, True, False], [False, False, True]]
    assert "memory of another GPU: 0 to 2, 1 to 2, 2 to 0, 2 to 1." in warned(facts)["peer access"]
    assert "  yes yes NO " in machine.lines(facts)


def test_small_shared_memory_and_few_files_have_a_remedy(tmp_path: Path) -> None:
    facts = look(Machine(), tmp_path)
    facts |= {"shared_memory": {"MiB": 64, "free MiB": 64}, "limits": {"open files": "256"}}
    remedies = {one["about"]: one["remedy"] for one in remarks.warnings(facts)}
    assert remedies["shared memory"] == "start the container with --shm-size=1g or --ipc=host"
    assert remedies["open files"] == "ulimit -n 65536"
    facts |= {"shared_memory": {"MiB": 1024}, "limits": {"open files": "unlimited"}}
    assert {one["about"] for one in remarks.warnings(facts)} == {"NVLink"}


def test_container_and_mps_are_detected(tmp_path: Path) -> None:
    assert look(Machine(), tmp_path)["container"] == ""
    assert look(Machine(), tmp_path, {"container": "oci"})["container"] == "oci"
    (tmp_path / ".dockerenv").write_text("")
    process = tmp_path / "proc" / "17"
    process.mkdir(parents=True)
    (process / "comm").write_text("nvidia-cuda-mps-server\n")
    facts = look(Machine(), tmp_path)
    assert (facts["container"], facts["mps"]) == ("Docker", True)
    assert "can end the others" in warned(facts)["MPS"]
    assert look(Machine(), tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})["container"] == "Kubernetes"
    (process / "comm").write_text("python\n")
    assert not look(Machine(), tmp_path)["mps"]
    assert look(Machine(), tmp_path, {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})["mps"]


def test_private_values_of_variables_are_hidden() -> None:
    shown = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.6",
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "^docker0,lo",
        "MASTER_PORT": "29500",
    }
    hidden = {
        "MASTER_ADDR": "node7",
        "NCCL_DEBUG_FILE": "/home/alice/nccl.log",
        "TORCH_LOGS_OUT": "logs/it",
        "NCCL_COMM_ID": "10.1.2.3:2000",
        "CUDA_DEVICE": "GPU-6c1f5b7a",
        "GLOO_HOST": "node7.cluster.example",
        "MINIFSDP_TOKEN": "abc",
    }
    left_out = {"PATH": "/bin", "HOME": "/home/alice", "AWS_SECRET": "x", "MINIFSDP_KIT": "/tmp/x", "RANKING": "1"}
    expected = shown | dict.fromkeys(hidden, "(hidden)")
    assert machine.variables(shown | hidden | left_out) == expected


def test_variables_that_change_times_have_a_warning(tmp_path: Path) -> None:
    facts = look(Machine(), tmp_path, {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"})
    assert warned(facts)["variables"] == "NCCL_P2P_DISABLE is set, so times are not normal"
    assert "variables: NCCL_IB_DISABLE=0 NCCL_P2P_DISABLE=1" in machine.lines(facts)


def test_command_that_hangs_fails_or_is_missing_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(nvidia_smi, "LIMIT", 1.0)
    programs = {"hangs-here": "sleep 600", "fails-here": "echo no devices; exit 9", "works-here": "echo good"}
    programs["refuses-here"] = "echo 'Field \"x\" is not a valid field to query.'; exit 2"
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    answers = [nvidia_smi.ask_command([name]) for name in (*programs, "missing-here")]
    assert answers == [None, None, "good\n", 'Field "x" is not a valid field to query.\n', None]
