"""A store in a folder that others may write to: what is there could be planted, so it is refused with the way out."""

import os
import stat
from types import SimpleNamespace

import pytest
from stored import SHAPE, files, fill, new, read, text
from tiny_gguf import make_model

from pylongctx.cli import main
from pylongctx.store import KVStore, trust

OTHER = 54321  # a user that is neither root nor this process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE)


def open_store(folder):
    KVStore(str(folder), 1 << 30, dict, lambda: "weights").close()


def give_away(folder, monkeypatch):
    """Let a folder belong to another user, really where this process may do so."""
    if os.geteuid() == 0:
        try:
            os.chown(folder, OTHER, -1)
            return
        except OSError:  # a name space without that user
            pass
    owned = SimpleNamespace(st_uid=OTHER, st_mode=os.stat(folder).st_mode)
    monkeypatch.setattr(trust, "os", SimpleNamespace(stat=lambda path: owned, geteuid=os.geteuid))


@pytest.mark.parametrize(
    ("owner", "mode", "user", "why"),
    [
        (1000, 0o700, 1000, ""),
        (1000, 0o755, 1000, ""),
        (0, 0o755, 1000, ""),
        (0, 0o700, 0, ""),
        (1001, 0o700, 1000, "user 1001 owns it, and this process is user 1000.*chown -R 1000 '/a b'"),
        (1000, 0o700, 0, "user 1000 owns it, and this process is user 0.*chown -R 0 '/a b'"),
        (1000, 0o720, 1000, r"others may write to it \(its mode is 720\).*chmod -R go-w '/a b'"),
        (1000, 0o702, 1000, r"others may write to it \(its mode is 702\)"),
        (0, 0o1777, 1000, r"others may write to it \(its mode is 1777\)"),
        (0, 0o1777, 0, r"others may write to it \(its mode is 1777\)"),
    ],
)
def test_who_is_trusted(owner, mode, user, why):
    reason = trust.refusal("/a b", owner, stat.S_IFDIR | mode, user)
    assert bool(reason) == bool(why)
    if why:
        with pytest.raises(PermissionError, match=why):
            raise PermissionError(reason)


def test_a_folder_of_another_user(tmp_path, monkeypatch):
    open_store(tmp_path / "kv")
    give_away(tmp_path / "kv", monkeypatch)
    with pytest.raises(PermissionError, match=f"kv cannot be a KV store: user {OTHER} owns it"):
        open_store(tmp_path / "kv")


def test_a_folder_that_others_may_write(model, tmp_path, capsys):
    folder = tmp_path / "kv"
    fill(model, folder)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="its mode is 770"):
        new(model, folder)
    assert main(["complete", "-m", str(model), "--kv-store", str(folder), "-p", "a"]) == 1
    assert "chmod -R go-w" in capsys.readouterr().err
    assert main(["kv", "ls", str(folder)]) == 0
    folder.chmod(0o750)
    with new(model, folder) as llm:
        assert read(llm, text())[1] == 0


def test_what_is_made_is_for_its_owner(model, tmp_path):
    before = os.umask(0)
    try:
        fill(model, tmp_path / "kv")
    finally:
        os.umask(before)
    folders = [tmp_path / "kv", *(path.parent for path in files(tmp_path / "kv"))]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path / "kv")} == {0o600}


def test_a_link_that_changes_leads_nowhere_else(tmp_path):
    one, other, link = tmp_path / "one", tmp_path / "other", tmp_path / "link"
    one.mkdir(mode=0o700)
    other.mkdir(mode=0o777)
    link.symlink_to(one)
    store = KVStore(str(link), 1 << 30, dict, lambda: "weights")
    link.unlink()
    link.symlink_to(other)
    assert store.folder.path == one
    store.close()
