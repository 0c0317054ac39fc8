"""``native/install.py``: a line for each step and for each tenth of a compilation, and everything when it fails."""

from install import Steps, install

SAID = """
Processing ./pylongctx
  Collecting numpy>=1.24
  Downloading numpy-2.4.6-cp311-cp311-manylinux.whl (16.9 MB)
  *** Configuring CMake...
  -- Compiling for this machine's CPU only; GGML_NATIVE=OFF gives a portable library
  -- Fetching upstream with pip (about 77 MB)
  -- Extracting and patching upstream in build/upstream
  *** Building project with Ninja...
  [1/40] Building CXX object a.o
  [4/40] Building CXX object b.o
  [5/40] Building CXX object c.o
  [40/40] Linking CXX shared library libllama.so
  *** Installing project into wheel...
  Collecting rich
"""


def test_steps_are_said_once_and_tenths_of_the_compilation():
    steps = Steps()
    said = [news for line in SAID.splitlines() if (news := steps.line(line))]
    assert [news.partition("]")[0] for news in said if news[0] == "["] == [f"[{n}/7" for n in range(2, 8)]
    others = [news.partition(",")[0].partition(";")[0].strip() for news in said if news[0] != "["]
    assert others == ["Compiling for this machine's CPU only", "10 %", "100 %"]


def test_what_is_there_already_is_not_announced():
    steps = Steps()
    assert steps.line("  *** Building project with Ninja...").startswith("[6/7] compiling")
    assert steps.line("-- Fetching upstream with pip") is None
    assert steps.line("ninja: no work to do.") is None


def test_a_failure_prints_what_pip_said(capsys, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'no_such_backend'\n")
    assert install([str(tmp_path)]) != 0
    assert "no_such_backend" in capsys.readouterr().out
