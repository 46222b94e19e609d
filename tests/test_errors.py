"""What a process does that fails, or whose peer is gone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import TIMEOUT_S

from app.distributed.agreement import connecting
from app.errors import TopologyError, is_of_a_lost_peer

FAILS = """
import atexit, os
from app.errors import skip_destructors_if_failed
failed = skip_destructors_if_failed()
atexit.register(print, "a tracker says goodbye", end="")
class Group:
    def __del__(self):
        os.abort()
group = Group()
failed.set()
raise RuntimeError("struck")
"""


def test_what_failed_destroys_nothing_and_has_its_traceback_last():
    """gloo's destructors abort now and then."""
    over = subprocess.run([sys.executable, "-c", FAILS], check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (over.returncode, over.stdout) == (1, "a tracker says goodbye")
    assert over.stderr.endswith("\nRuntimeError: struck\n")


TCP = "/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
)
USAGE = (
    "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
FOLLOWS = {
    # Met here: torch 2.15, two processes.
    "gloo, late": f"[{TCP}unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete",
    "gloo, gone": f"[{TCP}pair.cc:561] Connection closed by peer [127.0.0.1]:18340.",
    # Texts of libtorch_cpu.so 2.15, with the names of gloo's tcp/pair.cc and tcp/unbound_buffer.cc
    "gloo, not read": f"[{TCP}pair.cc] Read error [127.0.0.1]: No route to host. This is typically caused by a remote worker",
    "gloo, gone before": f"[{TCP}pair.cc] Pair is not connected ([127.0.0.1]:1 <--> [127.0.0.1]:2)",
    "gloo, by another": f"[{TCP}unbound_buffer.cc] Application timeout caused pair closure",
    # github.com/NVIDIA/nccl/issues/2076, 1928, 795
    "OFI": NCCL + REMOTE + "NET/OFI Request 0x7f14cc5b60c0 completed with error. RC: 113. Error: 2 (UNDELIVERABLE).",
    # torch 2.15, ProcessGroupNCCL.cpp, NCCLUtils.cpp, nccl2/ and TCPStore.cpp
    "aborted": "NCCL communicator was aborted on rank 1.",
    "nccl2, late": "Watchdog caught collective operation timeout: NCCL operation timed out",
    "no rank 0": "[1] is setting up NCCL communicator, but store->get('0') got error: wait timeout after 600000ms",
    "no store": "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
}
CAUSES = {
    # libtorch_cpu.so 2.15, as above
    "gloo, other sizes": f"[enforce fail at {TCP}pair.cc] op.preamble.length <= op.nbytes. 8 vs 4.",
    "gloo, no interface": f"[enforce fail at {TCP}device.cc:84] ifa != nullptr. Unable to find address for: nosuch",
    # github.com/NVIDIA/Megatron-LM/issues/661
    "one GPU": NCCL + USAGE + "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000",
    "versions": NCCL + USAGE + "Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22705",
    # torch 2.15, ProcessGroupNCCL.cpp
    "no GPU": "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
}


@pytest.mark.parametrize("name", [*FOLLOWS, *CAUSES])
def test_only_an_error_that_follows_another_process_waits_for_it(name: str) -> None:
    assert is_of_a_lost_peer(RuntimeError({**FOLLOWS, **CAUSES}[name])) == (name in FOLLOWS)


def test_of_an_error_of_nccl_the_reason_is_told() -> None:
    reason = "Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22705"
    stack = "\nException raised from create at NCCLUtils.hpp:268 (most recent call first):\nframe #0: c10::Error::Error"
    with pytest.raises(TopologyError, match=rf"through NCCL: .* {reason}\. With NCCL_DEBUG"), connecting(1):
        raise RuntimeError(CAUSES["versions"] + stack)
