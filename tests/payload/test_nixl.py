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
from kvweave import CorruptPayload, InvalidArgument, Runner, TransferFailed, Unsupported
from kvweave.adapters.nixl import KvReceiver, KvSender
from kvweave.adapters.nixl.ticket import Ticket
from kvweave.payload import KvPayload
from local_heads import local_heads
from versions import needs_cuda

pytest.importorskip("nixl_cu13", reason="the extra kvweave[nixl] is not installed")

SECRET = b"a secret of these two processes"
PROMPT = random_tokens(150, 4).tolist()
_ROOT = Path(__file__).parents[2]

PREFILLS = """
import sys
sys.path[:0] = sys.argv[5:]
from families import tiny
from test_nixl import KINDS, PROMPT, SECRET, runner_of
from kvweave.adapters.nixl import KvSender
on_device = sys.argv[4] == "True"
runner = runner_of(*KINDS[int(sys.argv[1])], device=sys.argv[3])
with KvSender(SECRET) as sender, runner.prefill(PROMPT, "full") as done:
    payload = runner.export(done)
    with sender.offer(payload, valid_s=600.0, on_device=on_device) as offer:
        with open(sys.argv[2], "wb") as file:
            file.write(offer.ticket)
        print("offered", payload.sizes().total, payload.sizes().dense, flush=True)
        sys.stdin.readline()
        print("taken" if offer.wait(60) else "left", flush=True)
"""


KINDS: list[tuple[int, str | None]] = [(0, None), (1, None), (1, "int4"), (0, "half-int4")]
"""Heads of each layer that keep a window, and what full pages are packed in."""


def runner_of(local: int, kv_dtype: str | None = None, device: str = "cpu") -> Runner:
    """A runner in which `local` heads of each layer keep a window; in half precision on a GPU."""
    model = tiny("llama", head_dim=64)
    if device != "cpu":
        torch.cuda.set_device(device)
        model = model.bfloat16().to(device)
    plain = Runner(model, max_tokens=64, check=False, progress=False)
    heads = None
    if local:
        heads = local_heads(plain.cache.shape, local, 4, 24, model=plain.spec.fingerprint)
    sizes = {"kv_dtype": kv_dtype, "max_tokens": 512 if kv_dtype is None else 16384}
    return Runner(model, heads=heads, check=False, progress=False, **sizes)


class Prefilling:
    """The other process, with an offer."""

    def __init__(
        self, kind: int, folder: Path, device: str = "cpu", on_device: bool = False
    ) -> None:
        file = folder / "ticket"
        paths = [str(_ROOT / "tests" / part) for part in ("doubles", "payload")]
        words = [str(kind), str(file), device, str(on_device), *paths]
        arguments = [sys.executable, "-c", PREFILLS, *words]
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


@pytest.mark.parametrize("kind", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_one_process_prefills_and_another_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    payload, other = handed_over(kind, tmp_path)
    assert not any(part.is_cuda for part in payload.parts.values())
    expect_what_the_heads_leave(payload, other, kind)


@needs_cuda
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_one_gpu_prefills_and_another_decodes(tmp_path: Path, kind: int, on_device: bool) -> None:
    """On two GPUs where there are two; parts that stay on one come to the other as they lie."""
    there = f"cuda:{torch.cuda.device_count() - 1}"
    payload, other = handed_over(kind, tmp_path, "cuda:0", there, on_device)
    for name, part in payload.parts.items():
        if name.startswith(("group.", "packed.pages", "logits")):
            assert str(part.device) == (there if on_device else "cpu"), name
    expect_what_the_heads_leave(payload, other, kind)


def handed_over(
    kind: int, folder: Path, here: str = "cpu", there: str = "cpu", on_device: bool = False
) -> tuple[KvPayload, Prefilling]:
    """A prompt that another process prefilled, and from which a runner of ours said the same."""
    runner = runner_of(*KINDS[kind], device=there)
    other = Prefilling(kind, folder, here, on_device)
    device = None if there == "cpu" else there
    with KvReceiver(SECRET, device=device, timeout_s=120.0) as receiver:
        payload = receiver.take(other.ticket)
        assert other.end() == "taken"
        with pytest.raises(CorruptPayload, match="taken before"):
            receiver.take(other.ticket)
    answer = runner.resume(payload, max_new_tokens=12, stop=())
    alone = runner_of(*KINDS[kind], device=there)
    assert answer.tokens == alone.generate(PROMPT, "full", max_new_tokens=12, stop=()).tokens
    return payload, other


def expect_what_the_heads_leave(payload: KvPayload, other: Prefilling, kind: int) -> None:
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
        address, size, digest, _ = said["places"]["group.0"]
        lies: list[dict[str, Any]] = [
            {"places": {**said["places"], "group.0": [address, 10**10, "x", None]}},
            {"places": {name: p for name, p in said["places"].items() if name != "group.0"}},
            {"places": {**said["places"], "more": [0, 4, "x", None]}},
            {"places": {**said["places"], "group.0": [-1, 4, "x", None]}},
            {"places": {**said["places"], "group.0": [address, size, "x"]}},
            {"places": {**said["places"], "group.0": [address, size, "x", -1]}},
            {"places": {**said["places"], "group.0": [address, size, "x", True]}},
            {"header": {**said["header"], "tokens": 2**30}},
            {"header": None},
            {"until": time.time() - 1},
            {"until": "x"},
            {"peer": "*"},
            {"schema": 1},
        ]
        with KvReceiver(SECRET) as receiver:
            for lie in lies:
                with pytest.raises(CorruptPayload):
                    receiver.take(signed({**said, **lie}))
        # Bytes that are others than those of the ticket.
        wrong = {**said["places"], "group.0": [address, size, digest[::-1], None]}
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


def test_parts_on_a_device_are_refused_where_there_is_none(payload: KvPayload) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with (
        KvSender(SECRET) as sender,
        KvReceiver(SECRET) as receiver,
        sender.offer(payload, on_device=True) as offer,
    ):
        said = json.loads(offer.ticket[32:])
        for place in said["places"].values():
            place[3] = 0
        with pytest.raises(Unsupported, match="on_device=False"):
            receiver.take(signed(said))
        # What lies on the host stays there, and the ticket was not used up.
        assert torch.equal(receiver.take(offer.ticket).tokens, payload.tokens)


@pytest.mark.parametrize("device", ["nowhere", "meta", 1.5, "cuda:x"])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(InvalidArgument, match="device: expected"):
        KvReceiver(SECRET, device=device)


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
