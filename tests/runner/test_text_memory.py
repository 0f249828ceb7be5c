"""Places of texts that are packed finally: apart, at multiples of their units, and as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave import ops
from kvweave.errors import OutOfMemory, PoolFull
from kvweave.runner.kv import text_memory
from kvweave.runner.kv.places import Place
from kvweave.runner.kv.text_memory import TextMemory, memory_bytes, sizes_of

CPU = torch.device("cpu")
FORMATS = (ops.packed_format("half-int4", 32), ops.packed_format("int4", 32))
MOST = 20_000
SIZES = st.tuples(st.integers(1, 900), st.sampled_from((1, 48, 64, 144, 1152)))


def written(memory: TextMemory, places: list[Place]) -> dict[Place, torch.Tensor]:
    """Random bytes that places have from now on."""
    made = {}
    for place in places:
        made[place] = torch.randint(0, 256, (place.nbytes,), dtype=torch.uint8)
        memory.part(place).copy_(made[place])
    return made


@given(st.data(), st.integers(1, 200))
def test_places_come_and_go(data: Any, moved_bytes: int) -> None:
    """What fits is taken, what does not is refused and changes nothing, and no byte is lost."""
    memory, held = TextMemory(MOST, FORMATS, CPU), dict[Place, torch.Tensor]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text_memory, "MOVED_BYTES", moved_bytes)
        for _ in range(data.draw(st.integers(1, 40))):
            if held and data.draw(st.booleans()):
                gone = data.draw(st.sets(st.sampled_from(list(held)), min_size=1))
                memory.give(gone)
                held = {place: kept for place, kept in held.items() if place not in gone}
            sizes = data.draw(st.lists(SIZES, min_size=1, max_size=6))
            sizes = [(units * unit, unit) for units, unit in sizes]
            if memory.fits(sizes):
                taken = memory.take(sizes)
                assert [(place.nbytes, place.unit) for place in taken] == sizes
                held |= written(memory, taken)
            else:
                begins = [place.begin for place in held]
                with pytest.raises(PoolFull, match="expected room for"):
                    memory.take(sizes)
                assert [place.begin for place in held] == begins
            check(memory, held)


def check(memory: TextMemory, held: dict[Place, torch.Tensor]) -> None:
    """All places lie apart, behind what is nobody's, and have what was written there."""
    end = max(of.page_bytes for of in FORMATS)
    for place in sorted(held, key=lambda place: place.begin):
        assert place.begin >= end
        assert place.begin % place.unit == 0
        end = place.end
        assert torch.equal(memory.part(place), held[place])
    assert end <= len(memory.data)


def test_room_in_pieces_is_brought_together() -> None:
    """Where three of four lie and every other one goes, one as large as two finds room."""
    memory = TextMemory(MOST, FORMATS, CPU)
    size = MOST // 4
    places = memory.take([(size, 1)] * 4)
    kept = written(memory, places)
    memory.give([places[0], places[2]])
    assert not memory.fits([(2 * size + 1, 1)])
    assert memory.fits([(3 * size, 1)], without=[places[1]])
    (large,) = memory.take([(2 * size, 1)])
    assert memory.moves == 2
    assert torch.equal(memory.part(places[1]), kept[places[1]])
    assert torch.equal(memory.part(places[3]), kept[places[3]])
    assert large.begin == places[3].end


def test_a_shortage_while_others_move_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = TextMemory(MOST, FORMATS, CPU)
    size = MOST // 4
    places = memory.take([(size, 1)] * 4)
    kept = written(memory, places)
    memory.give([places.pop(2), places.pop(0)])

    def fails(*_given: Any) -> None:
        raise OutOfMemory("packed documents: expected memory for it, got none")

    with monkeypatch.context() as patched:
        patched.setattr(text_memory, "_zeros", fails)
        with pytest.raises(OutOfMemory):
            memory.take([(2 * size, 1)])
    assert memory.moves == 0
    check(memory, {place: kept[place] for place in places})
    memory.take([(2 * size, 1)])
    check(memory, {place: kept[place] for place in places})


def test_pages_are_those_of_their_format() -> None:
    """A page of a format is the bytes at its number, and so is a basis of one."""
    memory = TextMemory(1 << 20, FORMATS, CPU)
    for of in FORMATS:
        memory.take([(100, 4)])
        places = memory.take(sizes_of(of, 3, 5))
        assert places[0].nbytes == 3 * 6 * of.page_bytes
        kept = written(memory, places)
        pages = memory.pages(of)
        first = places[0].number
        there = pages.data[first : first + 18].flatten()
        assert torch.equal(there, kept[places[0]])
        if pages.bases is None:
            assert len(places) == 1
            continue
        first = places[1].number
        there = pages.bases.data[first : first + 3].flatten().view(torch.uint8)
        assert torch.equal(there, kept[places[1]])
    assert memory.nbytes == memory_bytes(1 << 20, FORMATS)
