"""Methods as strings, and the options that they refuse."""

import pytest

from pylongctx.methods import DualChunk, Full, LongHeads, SelfExtend, ShiftedRotary, Window, parse

pytestmark = pytest.mark.check


@pytest.mark.parametrize(
    "method",
    [
        Full(),
        Window(),
        Window(0, 64),
        SelfExtend(),
        SelfExtend(8, 128),
        SelfExtend(group_size=8),
        DualChunk(),
        DualChunk(48, 16),
        DualChunk(local_window=9),
        ShiftedRotary(),
        ShiftedRotary(48, 16),
        ShiftedRotary(local_window=9),
        LongHeads(),
        LongHeads.paper(),
        LongHeads.paper(256, 2048),
        LongHeads(64, 512, 0, "group", "minmax", "selfextend", 1024),
        LongHeads.quest(1024),
    ],
)
def test_spec_strings_round_trip(method):
    assert parse(str(method)) == method


def test_spec_strings():
    assert str(Full()) == "full"
    assert str(Window()) == "window,n_sink=4"
    assert str(SelfExtend()) == "selfextend"
    assert str(SelfExtend(8, 128)) == "selfextend,group_size=8,neighbor_window=128"
    assert str(DualChunk()) == "dca"
    assert str(DualChunk(48, 16)) == "dca,chunk_size=48,local_window=16"
    assert str(ShiftedRotary(48, 16)) == "string,shift_offset=48,local_window=16"
    assert str(LongHeads()) == "longheads"
    assert str(LongHeads.paper(256)) == (
        "longheads,chunk_size=256,n_recent=1,select=head,representation=attention,position=packed"
    )
    assert parse(" selfextend , group_size = 8 ") == SelfExtend(8)
    assert parse("longheads, select = group") == LongHeads(select="group")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown method ''; available: full, window, selfextend"),
        ("Full", "unknown method 'Full'"),
        ("longheads+selfextend", "both are bases"),
        ("longheads+nonsense", "unknown method 'nonsense'"),
        ("full,x=1", "unknown option 'x=1' of method 'full'; options: spans=N"),
        ("selfextend,group=8", "options: group_size=N, neighbor_window=N"),
        ("selfextend,group_size", "unknown option 'group_size'"),
        ("selfextend,", "unknown option ''"),
        ("selfextend,group_size=x", "must be an integer, not 'x'"),
        ("selfextend,group_size=8,group_size=9", "given twice"),
        ("selfextend,group_size=0", "group_size must be at least 1"),
        ("selfextend,neighbor_window=-1", "neighbor_window must be at least 1"),
        ("dca,window=8", "options: chunk_size=N, local_window=N"),
        ("dca,chunk_size=0", "chunk_size must be at least 1"),
        ("dca,chunk_size=8,local_window=9", "local_window must be at most 8, not 9"),
        ("string,shift=8", "options: shift_offset=N, local_window=N"),
        ("string,shift_offset=0", "shift_offset must be at least 1"),
        ("string,shift_offset=8,local_window=9", "local_window must be at most 8, not 9"),
        ("window,n_sink=-1", "n_sink must be at least 0"),
        ("window,window=0", "window must be at least 1"),
        ("longheads,chunk=16", r"options: chunk_size=N, window=N, n_recent=N, select=head\|group"),
        ("longheads,select=layer", "select must be head or group, not 'layer'"),
        ("longheads,select=", "select must be head or group, not ''"),
        ("longheads,representation=mean", "representation must be attention or minmax or outlier or keys1 or keys2"),
        ("longheads,position=true", "position must be full or string or dca or selfextend or packed, not"),
        ("longheads,chunk_size=head", "option 'chunk_size' of method 'longheads' must be an integer, not 'head'"),
        ("longheads,chunk_size=8", "chunk_size must be at least 16"),
        ("longheads,chunk_size=40", "chunk_size must be a multiple of 16, not 40; the nearest: 32 or 48"),
        ("longheads,window=0", "window must be at least 16"),
        ("longheads,chunk_size=64,window=100", r"window must be a multiple of chunk_size \(64\).*: 64 or 128"),
        (
            "longheads,chunk_size=64,window=32",
            r"window must be a multiple of chunk_size \(64\), not 32; the nearest: 64$",
        ),
        ("longheads,n_recent=-1", "n_recent must be at least 0"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize(
    "make_method",
    [
        lambda: SelfExtend(1.5),
        lambda: DualChunk(48.0),
        lambda: Window(None),
        lambda: Window(window=True),
        lambda: LongHeads("64"),
        lambda: LongHeads(select_from=1.0),
    ],
)
def test_options_are_integers(make_method):
    with pytest.raises(TypeError, match="must be an integer"):
        make_method()


@pytest.mark.parametrize("name", ["select", "representation", "position"])
def test_words_are_strings(name):
    with pytest.raises(TypeError, match=f"{name} must be a string or None, not 1"):
        LongHeads(**{name: 1})
