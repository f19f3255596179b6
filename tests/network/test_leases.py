"""Leases that are claimed and released by message are the same leases."""

from tests.network.conftest import PATIENCE_SECONDS, Connect, Lender
from tests.network.relay import Relay
from tests.support.waiting import wait_until
from vllm_mc2.leases import LeaseOffer
from vllm_mc2.network.borrower import RemoteLeases
from vllm_mc2.protocol import Ticket

TOKEN, DIGEST = b"t" * 16, b"d" * 32
BLOCKS = [3, 1, 4, 15]


def publish(lender: Lender, *, seconds: float = 60.0, is_copy_wanted: bool = False) -> Ticket:
    ticket = lender.book.publish(TOKEN, DIGEST, 60, BLOCKS, seconds, "payload", is_copy_wanted=is_copy_wanted)
    assert ticket is not None
    return ticket


def look_up(leases: RemoteLeases, ticket: Ticket) -> LeaseOffer | None:
    answers: list[LeaseOffer | None] = []

    def is_answered() -> bool:
        answer = leases.look_up(ticket)
        if answer != "pending":
            answers.append(answer)
        return bool(answers)

    wait_until(is_answered)
    return answers[0]


def claim(leases: RemoteLeases, ticket: Ticket) -> str:
    assert look_up(leases, ticket) is not None
    assert leases.claim(ticket.lease_id) == "pending"
    verdicts: list[str] = []

    def is_decided() -> bool:
        verdict = leases.poll(ticket.lease_id)
        if verdict != "pending":
            verdicts.append(verdict)
        return bool(verdicts)

    wait_until(is_decided)
    return verdicts[0]


def test_claim_read_the_table_release(lender: Lender, connect: Connect) -> None:
    session = connect()
    leases = RemoteLeases(session)
    ticket = publish(lender, is_copy_wanted=True)
    assert look_up(leases, ticket) == LeaseOffer(DIGEST, 60, 4, True)
    assert lender.book.view(9)[1][0].state == "offered"  # a look changes nothing
    assert claim(leases, ticket) == "held"
    assert leases.block_ids(ticket.lease_id) == BLOCKS
    assert lender.book.sweep() == []
    assert lender.book.view(9)[1][0].state == "held"
    leases.release(ticket.lease_id)
    wait_until(lender.book.sweep)
    assert len(lender.book) == 0
    assert look_up(leases, ticket) is None
    session.close()


def test_a_guessed_token_finds_nothing_and_ends_nothing(lender: Lender, connect: Connect) -> None:
    session = connect()
    leases = RemoteLeases(session)
    ticket = publish(lender)
    forged = Ticket.issue(ticket.incarnation, *ticket.lease_id, b"g" * 16)
    assert look_up(leases, forged) is None
    claimed = session.claim(forged).result(PATIENCE_SECONDS)
    assert not claimed.is_held  # type: ignore[union-attr]
    assert lender.book.sweep() == [] and len(lender.book) == 1
    assert claim(leases, ticket) == "held"
    session.close()


def test_an_offer_that_has_expired_is_dead(lender: Lender, connect: Connect) -> None:
    session = connect()
    leases = RemoteLeases(session)
    ticket = publish(lender, seconds=3.0)
    assert look_up(leases, ticket) is not None
    wait_until(lender.book.sweep)
    assert leases.claim(ticket.lease_id) == "pending"
    wait_until(lambda: leases.poll(ticket.lease_id) == "dead")
    session.close()


def test_two_claims_of_one_ticket_are_two(lender: Lender, connect: Connect) -> None:
    session = connect()
    leases = RemoteLeases(session)
    ticket = publish(lender)
    assert claim(leases, ticket) == claim(leases, ticket) == "held"
    leases.release(ticket.lease_id)
    session.look_up(ticket).result(PATIENCE_SECONDS)  # the release has arrived
    assert lender.book.sweep() == []
    leases.release(ticket.lease_id)
    wait_until(lender.book.sweep)
    session.close()


def test_a_decode_that_goes_away_gives_everything_back(lender: Lender, connect: Connect) -> None:
    session = connect()
    ticket = publish(lender)
    assert claim(RemoteLeases(session), ticket) == "held"
    session.close()
    ended: list[str] = []
    wait_until(lambda: ended.extend(lease.reason for lease in lender.book.sweep()) or ended)
    assert ended == ["peer_gone"]


def test_a_decode_that_is_cut_off_gives_everything_back_and_finds_out(lender: Lender, connect: Connect) -> None:
    with Relay(lender.address) as relay:
        session = connect(relay.port)
        leases = RemoteLeases(session)
        ticket = publish(lender)
        assert claim(leases, ticket) == "held"
        relay.cut()
        question = session.look_up(ticket)
        ended: list[str] = []
        wait_until(lambda: ended.extend(lease.reason for lease in lender.book.sweep()) or ended)
        assert ended == ["peer_gone"]
        assert question.exception(PATIENCE_SECONDS) is not None  # so what was read meanwhile is not believed
        assert look_up(leases, publish(lender)) is None
        session.close()


def test_other_decodes_are_not_touched_by_one_that_goes(lender: Lender, connect: Connect) -> None:
    first, second = connect(), connect()
    ticket = publish(lender)
    assert claim(RemoteLeases(first), ticket) == claim(RemoteLeases(second), ticket) == "held"
    first.close()
    wait_until(lambda: len(lender.ledgers) == 1)
    assert lender.book.sweep() == []
    second.close()
    wait_until(lender.book.sweep)


def test_a_release_of_what_is_not_held_ends_the_session_and_nothing_else(lender: Lender, connect: Connect) -> None:
    session, other = connect(), connect()
    ticket = publish(lender)
    session.release(ticket)
    wait_until(session.is_gone)
    assert len(lender.book) == 1
    assert claim(RemoteLeases(other), ticket) == "held"
    session.close()
    other.close()


def test_prefill_that_ends_is_noticed_at_once(lender: Lender, connect: Connect) -> None:
    session = connect(silence=3600.0)
    lender.server.close()
    wait_until(session.is_gone)
    session.close()
