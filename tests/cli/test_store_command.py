"""`kvweave store`: what it prints, within 80 columns, and what it takes away."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from commands import call, refused
from kvweave import Provenance, RemoteStore, Store


def of(namespace: str) -> Provenance:
    return Provenance(
        "model", dtype="bf16", layout="bytes", layers=1, kv_heads=1, head_dim=8, namespace=namespace
    )


def put(store: Store, namespace: str, text: int, **more: int) -> str:
    return store.put(of(namespace), np.arange(text, text + 3), {"kv": bytes(5000)}, **more)[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = Store(tmp_path / "kv")
    for text, namespace in enumerate(("a", "tenant/" * 300, "名前" * 40, "\x1b[31m[red]")):
        store.name(namespace, f"document {text} " + "long " * 50, put(store, namespace, text))
    put(store, "a", 9, expires=1)
    return tmp_path / "kv"


def spoil(root: Path, name: str) -> None:
    file = root / "shards" / f"{name}.kv"
    data = bytearray(file.read_bytes())
    data[8200] ^= 1
    file.write_bytes(bytes(data))


def test_ls_fits_eighty_columns_and_tells_what_is_there(root: Path, tmp_path: Path) -> None:
    from rich.cells import cell_len

    result = call("store", "ls", root, "--json", tmp_path / "all.json")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert "5 shards" in lines[-1]
    assert "\x1b" not in result.stdout
    assert "[red]" in result.stdout
    plain = json.loads((tmp_path / "all.json").read_text())
    assert len(plain) == 5
    assert {shard["provenance"]["dtype"] for shard in plain} == {"bf16"}
    for shard in plain:
        assert shard["name"][:12] in result.stdout
    own = call("store", "ls", root, "--namespace", "a").stdout
    assert "2 shards" in own
    assert "document 0" in own


def test_verify_and_gc_find_what_is_wrong(root: Path) -> None:
    good = call("store", "verify", root)
    assert (good.exit_code, good.stdout) == (0, "5 shards read, 0 files are wrong\n")
    store = Store(root)
    name = store.document("document 0 " + "long " * 50, "a").name
    spoil(root, name)
    (root / "writing" / "7-7").write_bytes(b"x" * 100)
    bad = call("store", "verify", root)
    assert bad.exit_code == 1
    assert f"{name[:12]}  shard part kv: expected the bytes of its checksum" in bad.stdout
    assert len(store.list()) == 5, "it only looks"
    (root / "writing" / "7-8").write_bytes(b"x" * 100)
    # Opening the store removes leftovers, so the collection itself finds none.
    assert call("store", "gc", root).stdout.startswith("0 leftovers, 1 expired, 0 spoiled: ")
    more = call("store", "gc", root, "--spoiled").stdout
    assert more.startswith("0 leftovers, 0 expired, 1 spoiled: ")
    assert call("store", "verify", root).exit_code == 0
    assert list((root / "writing").iterdir()) == []


def test_shards_go_from_store_to_store(root: Path, tmp_path: Path) -> None:
    name = Store(root).document("document 0 " + "long " * 50, "a").name
    file, there = tmp_path / "one.kv", tmp_path / "there"
    assert call("store", "export", root, name[:8], file).exit_code == 0
    assert "one that does not exist" in refused("store", "export", root, name, file)
    done = call("store", "import", there, file, "--document", "kept")
    assert done.exit_code == 0, done.output
    assert Store(there).document("kept", "a").name == name
    file.write_bytes(file.read_bytes()[:-1])
    assert "shard" in refused("store", "import", there, file)
    assert "one file to name" in refused("store", "import", there, file, file, "--document", "x")


def test_what_is_no_store_is_refused(root: Path, tmp_path: Path) -> None:
    for command in ("ls", "verify", "gc"):
        assert "a store" in refused("store", command, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    assert "thesis.tex" in refused("store", "ls", tmp_path / "home")
    assert "got 0 that begin with 'zz'" in refused("store", "export", root, "zz", tmp_path / "x")
    assert "got 5 that begin with ''" in refused("store", "export", root, "", tmp_path / "x")


def test_pin_keeps_a_shard_and_unpin_lets_it_go(root: Path) -> None:
    store = Store(root)
    name = put(store, "a", 50)
    assert call("store", "pin", root, name[:16], "the manual").exit_code == 0
    assert ("a", "the manual", name) in Store(root).documents()
    assert call("store", "unpin", root, "the manual").exit_code == 1
    assert call("store", "unpin", root, "the manual", "--namespace", "a").exit_code == 0
    assert ("a", "the manual", name) not in Store(root).documents()
    assert "expected one shard" in refused("store", "pin", root, "no such", "x")


def test_a_remote_store_is_listed_verified_and_collected(tmp_path: Path) -> None:
    pytest.importorskip("opendal", reason="the extra kvweave[remote] is not installed")
    said = {"scheme": "fs", "options": {"root": str(tmp_path / "far")}}
    described = tmp_path / "remote.json"
    described.write_text(json.dumps(said))
    store = RemoteStore.from_file(described)
    names = [store.put(of(n), np.arange(9), {"kv": bytes(9000)})[0] for n in ("a", "b")]
    store.put(of("c"), np.arange(9), {"kv": bytes(9000)}, expires=1)
    listed = call("store", "ls", described, "--remote")
    assert "3 shards" in listed.stdout
    assert names[0][:12] in listed.stdout
    own = call("store", "ls", described, "--remote", "--namespace", "a", "--json", tmp_path / "x")
    assert "1 shards" in own.stdout
    assert json.loads((tmp_path / "x").read_text())[0]["provenance"]["namespace"] == "a"
    assert call("store", "verify", described, "--remote").exit_code == 0
    file = tmp_path / "far" / "shards" / names[0]
    data = bytearray(file.read_bytes())
    data[8200] ^= 1
    file.write_bytes(bytes(data))
    wrong = call("store", "verify", described, "--remote")
    assert wrong.exit_code == 1
    assert names[0][:12] in wrong.stdout
    result = call("store", "gc", described, "--remote")
    assert "1 expired, 0 spoiled" in result.stdout
    assert "1 spoiled" in call("store", "gc", described, "--remote", "--spoiled").stdout
    assert [one.name for one in store.list()] == names[1:]
    assert "remote store" in refused("store", "ls", tmp_path / "none.json", "--remote")
