"""Two processes: one prefills, the other decodes, and NIXL carries what the heads need."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from families import random_tokens, tiny
from kvweave import CorruptPayload, InvalidArgument, Runner, TransferFailed
from kvweave.adapters.nixl import KvReceiver, KvSender
from kvweave.adapters.nixl.ticket import Ticket
from kvweave.payload import KvPayload
from local_heads import local_heads

pytest.importorskip("nixl_cu13", reason="the extra kvweave[nixl] is not installed")

SECRET = b"a secret of these two processes"
PROMPT = random_tokens(150, 4).tolist()
_ROOT = Path(__file__).parents[2]

PREFILLS = """
import sys
sys.path[:0] = sys.argv[3:]
from families import tiny
from test_nixl import KINDS, PROMPT, SECRET, runner_of
from kvweave.adapters.nixl import KvSender
runner = runner_of(*KINDS[int(sys.argv[1])])
with KvSender(SECRET) as sender, runner.prefill(PROMPT, "full") as done:
    payload = runner.export(done)
    with sender.offer(payload, valid_s=600.0) as offer:
        with open(sys.argv[2], "wb") as file:
            file.write(offer.ticket)
        print("offered", payload.sizes().total, payload.sizes().dense, flush=True)
        sys.stdin.readline()
        print("taken" if offer.wait(60) else "left", flush=True)
"""


KINDS: list[tuple[int, str | None]] = [(0, None), (1, None), (1, "int4"), (0, "half-int4")]
"""Heads of each layer that keep a window, and what full pages are packed in."""


def runner_of(local: int, kv_dtype: str | None = None) -> Runner:
    """A runner in which `local` heads of each layer keep a window."""
    model = tiny("llama", head_dim=64)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    heads = None
    if local:
        heads = local_heads(plain.cache.shape, local, 4, 24, model=plain.spec.fingerprint)
    sizes = {"kv_dtype": kv_dtype, "max_tokens": 512 if kv_dtype is None else 16384}
    return Runner(model, heads=heads, check=False, progress=False, **sizes)


class Prefilling:
    """The other process, with an offer."""

    def __init__(self, kind: int, folder: Path) -> None:
        file = folder / "ticket"
        paths = [str(_ROOT / "tests" / part) for part in ("doubles", "payload")]
        arguments = [sys.executable, "-c", PREFILLS, str(kind), str(file), *paths]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(arguments, text=True, **pipes)
        said = ""
        assert self.process.stdout is not None
        while not said.startswith("offered"):
            said = self.process.stdout.readline()
            assert said, "the process that prefills has ended"
        self.total, self.dense = (int(number) for number in said.split()[1:])
        self.ticket = file.read_bytes()

    def end(self) -> str:
        return self.process.communicate("\n", timeout=120)[0].splitlines()[-1]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_one_process_prefills_and_another_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    runner = runner_of(*KINDS[kind])
    other = Prefilling(kind, tmp_path)
    with KvReceiver(SECRET, timeout_s=120.0) as receiver:
        payload = receiver.take(other.ticket)
        assert other.end() == "taken"
        with pytest.raises(CorruptPayload, match="taken before"):
            receiver.take(other.ticket)
    answer = runner.resume(payload, max_new_tokens=12, stop=())
    alone = runner_of(*KINDS[kind])
    assert answer.tokens == alone.generate(PROMPT, "full", max_new_tokens=12, stop=()).tokens
    # What came is what the head classes leave to be seen.
    held = {name: p.nbytes for name, p in payload.parts.items() if name not in ("tokens", "logits")}
    assert sum(held.values()) == other.total
    local, kv_dtype = KINDS[kind]
    assert ("packed.pages" in held) == (kv_dtype is not None)
    if kv_dtype is None:
        assert (other.total < other.dense) == bool(local)


@pytest.fixture(scope="module")
def payload() -> KvPayload:
    runner = runner_of(0)
    with runner.prefill(PROMPT, "full") as done:
        return runner.export(done)


def test_a_ticket_that_was_not_signed_or_was_changed_is_refused(payload: KvPayload) -> None:
    stranger = KvReceiver(b"another secret of sixteen bytes")
    with KvSender(SECRET) as sender, KvReceiver(SECRET) as receiver, sender.offer(payload) as offer:
        ticket = offer.ticket
        for place in (0, 31, 32, 60, len(ticket) - 1):
            changed = bytearray(ticket)
            changed[place] ^= 1
            with pytest.raises(CorruptPayload, match="signed"):
                receiver.take(bytes(changed))
        for other in (b"", ticket[:32], ticket[:-1], ticket + b" ", "text", None):
            with pytest.raises(CorruptPayload):
                receiver.take(other)
        with pytest.raises(CorruptPayload, match="signed"):
            stranger.take(ticket)
        assert torch.equal(receiver.take(ticket).tokens, payload.tokens)


def test_a_peer_that_knows_the_secret_and_lies_is_refused(payload: KvPayload) -> None:
    with KvSender(SECRET) as sender, sender.offer(payload) as offer:
        said = json.loads(offer.ticket[32:])
        lies: list[dict[str, Any]] = [
            {"places": {**said["places"], "group.0": [said["places"]["group.0"][0], 10**10, "x"]}},
            {"places": {name: p for name, p in said["places"].items() if name != "group.0"}},
            {"places": {**said["places"], "more": [0, 4, "x"]}},
            {"places": {**said["places"], "group.0": [-1, 4, "x"]}},
            {"header": {**said["header"], "tokens": 2**30}},
            {"header": None},
            {"until": time.time() - 1},
            {"until": "x"},
            {"peer": "*"},
            {"schema": 2},
        ]
        with KvReceiver(SECRET) as receiver:
            for lie in lies:
                with pytest.raises(CorruptPayload):
                    receiver.take(signed({**said, **lie}))
        # Bytes that are others than those of the ticket.
        address, size, digest = said["places"]["group.0"]
        wrong = {**said["places"], "group.0": [address, size, digest[::-1]]}
        with (
            KvReceiver(SECRET) as other,
            pytest.raises(CorruptPayload, match="bytes of its ticket"),
        ):
            other.take(signed({**said, "places": wrong}))
        with (
            KvReceiver(SECRET, most_bytes=1000) as narrow,
            pytest.raises(CorruptPayload, match="at most"),
        ):
            narrow.take(offer.ticket)


def signed(said: dict[str, Any]) -> bytes:
    from kvweave.adapters.nixl.ticket import _signature

    text = json.dumps(said).encode()
    return _signature(SECRET, text) + text


def test_a_sender_that_is_gone_is_no_end_of_the_receiver(tmp_path: Path) -> None:
    other = Prefilling(0, tmp_path)
    other.process.kill()
    other.process.wait()
    begun = time.monotonic()
    with KvReceiver(SECRET, timeout_s=5.0) as receiver, pytest.raises(TransferFailed):
        receiver.take(other.ticket)
    assert time.monotonic() - begun < 60


def test_an_offer_that_nobody_takes_is_left(payload: KvPayload) -> None:
    with KvSender(SECRET) as sender, sender.offer(payload, valid_s=0.0) as offer:
        assert not offer.wait(0.05)
        with pytest.raises(CorruptPayload, match="expired"):
            Ticket.decode(offer.ticket, SECRET)


@pytest.mark.parametrize("secret", [None, b"short", "a text of sixteen", bytes(65)])
def test_what_is_no_secret_is_refused(secret: Any) -> None:
    for kind in (KvSender, KvReceiver):
        with pytest.raises(InvalidArgument, match="secret"):
            kind(secret)


def test_an_end_that_is_closed_takes_and_offers_no_more(payload: KvPayload) -> None:
    with KvSender(SECRET) as sender, sender.offer(payload) as offer:
        with KvReceiver(SECRET) as receiver:
            pass
        with pytest.raises(InvalidArgument, match="KvReceiver: expected an open one"):
            receiver.take(offer.ticket)
        # Nobody read what it offers, so another receiver may.
        with KvReceiver(SECRET) as other:
            assert other.take(offer.ticket).parts.keys() == payload.parts.keys()
        receiver.close()
    with pytest.raises(InvalidArgument, match="KvSender: expected an open one"):
        sender.offer(payload)
