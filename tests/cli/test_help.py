"""Help of every command answers without a tensor library and without the modules of other commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fathomlm.cli.main import COMMANDS, main

PATHS = [
    [name, *kind]
    for name, command in COMMANDS.items()
    for kind in ([[each] for each in command.kinds] if command.kinds else [[]])
]
HEAVY = ("torch", "numpy", "transformers", "matplotlib", "rich", "yaml")
SCRIPT = """
import sys
from fathomlm.cli.main import COMMANDS, main
for words in eval(sys.argv[1]):
    before = set(sys.modules)
    try:
        main([*words, "--help"])
    except SystemExit:
        pass
    print("LOADED", words, [name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""


def test_no_help_loads_a_tensor_library() -> None:
    """All in one process: what one of them loaded would be seen at the end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(heavy=HEAVY), repr([[], *PATHS])], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOADED")]
    assert len(lines) == len(PATHS) + 1
    assert all(line.endswith("[]") for line in lines), lines


@pytest.mark.parametrize("name", ["generate", "inspect", "plan"])
def test_help_loads_no_other_command(name: str) -> None:
    code = f"from fathomlm.cli.main import main\ntry:\n    main(['{name}', '--help'])\nexcept SystemExit:\n    import sys\n"
    code += "    print('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("MODULES")[2].split())
    others = {
        f"fathomlm.{each.options.partition(':')[0]}" for other, each in COMMANDS.items() if other != name and each.options
    }
    own = COMMANDS[name].options.partition(":")[0]  # which commands of one room share
    assert not (others - {f"fathomlm.{own}"}) & loaded


def test_a_default_of_the_command_s_own_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Not what is said of the option elsewhere, where it depends on the workload."""
    for kind, default in (("latency", "(default: 8)"), ("throughput", "thesis: 1000")):
        with pytest.raises(SystemExit):
            main(["bench", kind, "--help"])
        assert default in " ".join(capsys.readouterr().out.partition("--requests N")[2].split())[:80]
