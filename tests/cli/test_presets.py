"""Options per model, from the file of --models-preset."""

import pytest

from pylongctx.cli import make_parser, parse
from pylongctx.cli.presets import presets
from pylongctx.cli.serve import OF_SERVER, OWN, OWN_SWITCHES, model_words, preset_file, serves_several

FILE = """\
version = 1
; options of all models
[*]
c = 8192            # tokens of a sequence
n-gpu-layers = 3
no-ui = true

[ one ]
LLAMA_ARG_CTX_SIZE = 4096
temp=-1
chat-template-kwargs = {"a": 1}
prefill-assistant = off
load-on-startup = true

[mine]
model = other.gguf
method = longheads,window=2048
"""


@pytest.fixture(scope="module")
def parser():
    return make_parser("serve")


def parsed(parser, *words):
    return parse(parser, ["serve", *words])


def chosen(parser, tmp_path, text, *words):
    path = tmp_path / "models.ini"
    path.write_text(text)
    args = parsed(parser, "--models-preset", str(path), *words)
    return presets(args, preset_file(args), (*OWN, *OWN_SWITCHES, *OF_SERVER))


def test_sections_replace_options_of_all_models(parser, tmp_path):
    found = chosen(parser, tmp_path, FILE)
    assert found.words("two") == ["--ctx-size=8192", "--n-gpu-layers=3", "--no-ui"]
    assert found.words("one") == [
        *("--ctx-size=4096", "--n-gpu-layers=3", "--no-ui", "--temperature=-1"),
        *('--chat-template-kwargs={"a": 1}', "--no-prefill-assistant"),
    ]
    assert found.words("mine")[-1] == "--method=longheads,window=2048"
    assert found.models == {"mine": "other.gguf"}
    assert [found.loads(name) for name in ("one", "two", "mine")] == [True, False, False]


def test_the_words_mean_what_the_file_says(parser, tmp_path):
    args = parsed(parser, *chosen(parser, tmp_path, FILE).words("one"))
    assert (args.ctx_size, args.temp, args.page, args.prefill_assistant) == (4096, -1.0, False, False)
    assert args.chat_template_kwargs == {"a": 1}


def test_the_command_line_has_precedence(parser, tmp_path):
    found = chosen(parser, tmp_path, FILE, "-c", "512", "--ui")
    assert found.words("one")[0] == "--n-gpu-layers=3"
    assert not [word for word in found.words("one") if word.startswith(("--ctx-size", "--no-ui"))]


def test_variables_do_not_have_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    assert "--ctx-size=4096" in chosen(make_parser("serve"), tmp_path, FILE).words("one")


def test_all_models_may_be_loaded_at_first(parser, tmp_path):
    found = chosen(parser, tmp_path, "[*]\nload-on-startup = on\n[a]\nload-on-startup = off")
    assert [found.loads(name) for name in "ab"] == [False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nctx-siez = 4", r"line 2, section \[a\]: there is no option ctx-siez"),
        ("[*]\n\nctx-size = many", r"line 3, section \[\*\]: ctx-size: 'many' is not an integer"),
        ("[a]\nport = 80", r"line 2, section \[a\]: port is an option of the whole server"),
        ("[a]\nmodels-max = 2", r"models-max is an option of the whole server"),
        ("[a]\nstop-timeout = 3", r"there is no option stop-timeout: --grace of the server"),
        ("[a]\nmmproj = x.gguf", r"line 2, section \[a\]: mmproj: not supported: only text input"),
        ("[a]\nui = maybe", r"line 2, section \[a\]: ui: 'maybe' is neither on nor off"),
        ("[a]\nload-on-startup = soon", r"load-on-startup: 'soon' is neither on nor off"),
        ("[a]\nmodel =", r"line 2, section \[a\]: model: the value is missing"),
        ("[*]\nmodel = a.gguf", r"line 2, section \[\*\]: a model needs a section of its own"),
        ("c = 4", r"line 1: c is in no section"),
        ("[a]\n[b]\n[a]", r"line 3: the section \[a\] is there twice"),
        ("[]", r"line 1: the section \[\] has no name"),
        ("[a]\nui", r"line 2: 'ui' is neither \[MODEL\] nor OPTION = VALUE"),
    ],
)
def test_mistakes_name_section_and_line(parser, tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        chosen(parser, tmp_path, text)


def test_a_section_needs_a_model(parser, tmp_path):
    found = chosen(parser, tmp_path, FILE)
    found.check(["one", "two", "mine"])
    with pytest.raises(ValueError, match=r"models.ini, section \[one\]: there is no model 'one': add model = FILE"):
        found.check(["two", "mine"])


def test_which_server_it_is(parser, monkeypatch, tmp_path):
    assert not serves_several(parsed(parser))
    assert serves_several(parsed(parser, "--models-preset", "a.ini"))
    with pytest.raises(ValueError, match=r"--models-preset cannot be combined with a model, here 'm.gguf'"):
        serves_several(parsed(parser, "--models-preset", "a.ini", "-m", "m.gguf"))
    monkeypatch.setenv("LLAMA_ARG_MODELS_PRESET", "a.ini")
    other = make_parser("serve")
    assert serves_several(parsed(other))
    assert not serves_several(parsed(other, "-m", "m.gguf"))
    assert model_words(parsed(other)) == []
