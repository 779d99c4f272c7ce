"""The network of a `World`: manifests, fetches and commits move only when a test moves them."""

from __future__ import annotations

from kv_transfer.manifest import Closing, Opening, Pieces
from kv_transfer.manifest_wire import pack_part, unpack_part
from kv_transfer.transport import Fetched
from kv_transfer.verification import spans_of
from pd_engine.errors import Gone, PdRelayError, Unavailable
from support.handoff_sides import Destination, Stream, Transfer
from support.handoff_world import LEASE_MS, MAX_BYTES_IN_FLIGHT, NUM_BLOCKS, World


def deliver(world: World, stream: Stream) -> None:
    """The next part of a manifest, as bytes."""
    handoff, book = stream.handoff, stream.destination.book
    try:
        if not stream.is_open:
            opening = Opening(
                worker_id="p", epoch=stream.source.epoch, fingerprint="ab", layout=world.layout, host_id="h",
                num_tokens=handoff.num_tokens, num_held_blocks=handoff.num_held_blocks,
                num_arena_blocks=NUM_BLOCKS, lease_ms=LEASE_MS, checksums=True, transports={},
            )
            part = unpack_part(pack_part(opening))
            assert isinstance(part, Opening)
            book.opened(stream.lease, part)
            stream.is_open = True
        elif not handoff.is_live and handoff.closing is None:
            raise Gone
        elif stream.num_sent < len(handoff.records):
            part = unpack_part(pack_part(Pieces(handoff.records[stream.num_sent])))
            assert isinstance(part, Pieces)
            book.announced(stream.lease, part.records)
            stream.num_sent += 1
        elif handoff.closing is not None:
            part = unpack_part(pack_part(handoff.closing))
            assert isinstance(part, Closing)
            world.streams.remove(stream)
            book.closed(stream.lease, part, world.now_s)
    except PdRelayError as error:
        world.break_pull(stream.destination, stream.lease, error)
    world.settle(stream.destination)


def start_fetch(world: World, destination: Destination) -> None:
    fetch = destination.book.next_fetch()
    if fetch is None:
        return
    in_flight = destination.book.num_bytes_in_flight
    largest = max(world.layout.piece_bytes(c) for c in range(len(world.layout.components)))
    assert in_flight <= max(MAX_BYTES_IN_FLIGHT, largest), f"{in_flight} bytes in flight"
    assert fetch.lease.source is not None
    source = world.by_token[fetch.lease.source.token]
    spans = spans_of(fetch, destination.arena, NUM_BLOCKS)
    before = source.arena.generations[spans.block_ids]
    world.transfers.append(Transfer(destination, fetch, spans, source.arena, before))


def copy(world: World, transfer: Transfer, count: int, *, corrupt: bool = False) -> None:
    """Some more ranges arrive, wanted or not."""
    spans = transfer.spans
    end = min(transfer.num_copied + count, len(spans))
    for index in range(transfer.num_copied, end):
        start, target, length = (
            int(column[index]) for column in (spans.source_offsets, spans.offsets, spans.lengths)
        )
        transfer.destination.arena.buffer[target : target + length] = (
            transfer.source_arena.buffer[start : start + length]
        )
        if corrupt:
            transfer.destination.arena.buffer[target] ^= 1
            transfer.is_clean = False
    transfer.num_copied = end


def finish(world: World, transfer: Transfer) -> None:
    """The transport reports success."""
    if transfer.is_given_up:
        return
    copy(world, transfer, len(transfer.spans))
    fetched = Fetched(
        generations_before=transfer.before,
        generations_after=transfer.source_arena.generations[transfer.spans.block_ids],
    )
    world.transfers.remove(transfer)
    right = world.parts.verify(transfer.fetch, fetched, transfer.destination.arena, world.parts.checksums)
    if not right.all() and transfer.is_clean and world.is_pinned(transfer):
        world.num_wrong_without_fault += 1
    _assert_right(world, transfer, right.tolist())
    transfer.destination.book.fetched(transfer.fetch, right, world.now_s)
    world.settle(transfer.destination)


def rush(world: World, stream: Stream) -> None:
    """Nothing disturbs one pull until there is nothing more to fetch for it."""
    for _ in range(12):
        if stream in world.streams:
            deliver(world, stream)
        start_fetch(world, stream.destination)
        for transfer in [t for t in world.transfers if t.destination is stream.destination]:
            if transfer in world.transfers:
                finish(world, transfer)


def fail(world: World, transfer: Transfer) -> None:
    """The transport reports an error; bytes may still arrive until `quiesce`."""
    if not transfer.is_given_up:
        transfer.is_given_up = True
        world.break_pull(transfer.destination, transfer.fetch.lease, Unavailable("fetch failed"))


def quiesce(world: World, transfer: Transfer) -> None:
    if transfer.is_given_up:
        world.transfers.remove(transfer)
        transfer.destination.book.quiesced(transfer.fetch)


def deliver_commit(world: World, index: int, *, keep: bool = False) -> None:
    """A commit arrives; with `keep` it will arrive again."""
    source, key, token = world.commits[index] if keep else world.commits.pop(index)
    try:
        source.book.commit(key, token, world.now_s)
    except Gone:
        return
    finally:
        world.settle_source(source)


def _assert_right(world: World, transfer: Transfer, right: list[bool]) -> None:
    """What was found right is what a correct worker computes."""
    batch, prompt = transfer.fetch.batch, world.prompts[transfer.fetch.lease.key.journey_id]
    for index, is_right in enumerate(right):
        if is_right:
            prompt.assert_piece(
                transfer.destination.arena, transfer.fetch.block_ids[index], int(batch.components[index]),
                int(batch.blocks[index]), int(batch.num_valid[index]),
            )
