"""How often a commander asks whether its peer is there, and how soon it gives one up: on the virtual clock."""

from __future__ import annotations

import pytest

from rlctl.command_stream.commander import Commander
from rlctl.v1.control_pb2 import ControlResponse, Pong
from tests.simulator.ports.network import End, Network
from tests.simulator.ports.virtual_time import SimClock, World


class Peer:
    """Answers pings while it is not silent."""

    def __init__(self) -> None:
        self.world = World(7)
        self.asked: list[float] = []
        self.silent = False
        network = Network(self.world)
        here, there = self.world.spawn("here"), self.world.spawn("there")
        network.listen(there, "there:1", self._serve)

        async def command() -> None:
            self.commander = Commander(await network.dialer(here).dial("there:1"), SimClock(here))
            await self.commander.run()

        here.start(command())

    async def _serve(self, end: End) -> None:
        async for message in end.receive():
            assert message.HasField("ping")
            self.asked.append(self.world.now)
            if not self.silent:
                end.send(ControlResponse(pong=Pong(nonce=message.ping.nonce), sent_at=int(self.world.now * 1e6)))


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_a_peer_that_has_just_answered_is_let_alone_for_a_turn(peer: Peer) -> None:
    peer.world.run(40.0)
    assert len(peer.asked) == 20
    assert not peer.commander.lost


def test_a_peer_that_does_not_answer_is_asked_at_every_turn_and_given_up_after_five(peer: Peer) -> None:
    peer.world.run(10.5)
    peer.silent, said = True, peer.commander.last_heard
    del peer.asked[:]
    peer.world.run(30.0)
    assert peer.commander.lost
    assert peer.commander.last_heard == said
    assert [round(later - sooner) for sooner, later in zip(peer.asked, peer.asked[1:], strict=False)] == [1, 1, 1]
    assert peer.asked[-1] < 17.0
