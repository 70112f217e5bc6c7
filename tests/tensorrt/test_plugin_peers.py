"""How a lost process is noticed, and the sizes of the fused kernel."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from irc.backends.cuda import peers
from irc.backends.cuda.norm import block_size, pack_size
from irc.backends.cuda.peers import Peer


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def account(process: int) -> Peer:
    """What a rank with that process would tell."""
    own = Peer.own(1, 2, "fact")
    return Peer(1, 2, own.host, process, peers._began(process) or 0, own.fact)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_process_is_gone_before_anybody_has_waited_for_it(
    other: subprocess.Popen[bytes],
) -> None:
    peer = account(other.pid)
    assert not peer.gone() and peers.lost([peer]) == []
    other.kill()
    deadline = time.monotonic() + 120
    while not peer.gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert str(peer) == f"rank 1 (process {other.pid})"
    assert peers.lost([Peer.own(0, 2, "fact"), peer]) == [peer]


def test_of_other_hosts_and_other_processes_of_that_number_nothing_is_assumed() -> None:
    own = Peer.own(0, 2, "")
    elsewhere = Peer(1, 2, own.host + 1, 2**22 + 1, 5, 0)
    unknown = Peer(1, 2, own.host, 2**22 + 1, 0, 0)
    assert not elsewhere.gone() and not unknown.gone()
    assert Peer(1, 2, own.host, own.process, own.began + 1, 0).gone()


def test_accounts_travel() -> None:
    both = [Peer.own(rank, 2, "fact") for rank in range(2)]
    assert len(both[0].pack()) == peers.SIZE
    assert peers.unpack(both[0].pack() + both[1].pack()) == both
    assert peers.disagreement(both, both[0]) == ""
    assert "is rank 1 of 2" in peers.disagreement(both[::-1], both[0])
    other = Peer.own(0, 2, "another fact")
    assert "runs something else than this rank 0" in peers.disagreement(both, other)


@pytest.mark.parametrize(
    ("dtype", "weight", "columns", "size"),
    [
        ("bf16", "bf16", 4096, 8),
        ("bf16", "f32", 768, 4),
        ("f32", "f32", 6, 2),
        ("f16", "f16", 7, 1),
    ],
)
def test_packs_divide_the_width(dtype: str, weight: str, columns: int, size: int) -> None:
    assert pack_size(dtype, weight, columns) == size and columns % size == 0
    threads = block_size(columns // size)
    assert threads % 32 == 0 and 32 <= threads <= 1024
