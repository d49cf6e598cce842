"""The command line, as a script and as a reader meet it."""

import io
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import matplotlib.image
import orbax.checkpoint as ocp
import pytest

import jmp_kit
from jmp_kit import cli

PROGRAMS = """
import jax, jax.numpy as jnp, jmp_kit

def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

params, x = {"w": jnp.eye(8) / 3}, jnp.ones((4, 8)) / 7

def loss():
    return loss_fn, params, x

def half():
    return jax.grad(jmp_kit.autocast(loss_fn, "mixed_bfloat16")), params, x

def overflows():
    return lambda x: jnp.log(x - 2.0), x

def raises():
    raise KeyError("mine")

def no_tuple():
    return loss_fn

def alone():
    return loss_fn,

def of_options(options):
    return loss_fn, params, x

constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "programs_of_cli.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("programs_of_cli", None)


def run(capsys, command):
    """The exit code, standard output and standard error."""
    code = cli.main(command.split())
    return code, *capsys.readouterr()


def test_audit(folder, capsys):
    code, output, _ = run(capsys, "audit programs_of_cli:half")
    assert code == 0
    assert "2 products, 1.02 kFLOP, 100.0% of it half (traced, cpu)" in output
    code, output, _ = run(capsys, "audit programs_of_cli.py:half --level compiled --json")
    assert code == 0
    assert json.loads(output)["level"] == "compiled"
    assert run(capsys, "audit programs_of_cli:half --assert-half")[0] == 0
    code, output, error = run(capsys, "audit programs_of_cli:loss --assert-half --plot a.png")
    assert code == 1
    assert "jmp-kit audit: saved a.png" in error
    assert "1 of 1 products do not take half operands" in error
    assert "1 products" in output
    assert run(capsys, "audit programs_of_cli:loss --except params/w")[0] == 0
    assert matplotlib.image.imread(folder / "a.png").std() > 0.05


def test_compare(folder, capsys):
    command = "compare programs_of_cli:loss --steps 1 --policies mixed_bfloat16"
    code, output, _ = run(capsys, f"{command} --max-error 0.1 --plot c.png")
    assert code == 0
    assert "mixed_bfloat16" in output
    assert matplotlib.image.imread(folder / "c.png").std() > 0.05
    code, output, error = run(capsys, f"{command} --max-error 1e-9 --json")
    assert code == 1
    assert "the gradient in mixed_bfloat16 is off by" in error
    assert [row["policy"] for row in json.loads(output)["rows"]][1:] == ["mixed_bfloat16"]


def test_locate(folder, capsys):
    code, output, _ = run(capsys, "locate programs_of_cli:overflows")
    assert (code, "float32 log gives nan: programs_of_cli.py:16" in output) == (1, True)
    code, output, _ = run(capsys, "locate programs_of_cli:overflows --json")
    assert (code, json.loads(output)["primitive"]) == (1, "log")
    assert run(capsys, "locate programs_of_cli:loss")[:2] == (0, "all is finite\n")
    code, output, _ = run(capsys, "locate programs_of_cli:loss --json")
    assert (code, json.loads(output)) == (0, {"found": None})


@pytest.mark.slow
def test_doctor(capsys):
    code, output, _ = run(capsys, "doctor --seconds 0.01")
    assert code == 0
    assert "on cpu" in output
    assert "policy to start with" in output


@pytest.mark.slow
def test_doctor_in_json(capsys):
    code, output, _ = run(capsys, "doctor --seconds 0.01 --json")
    assert (code, json.loads(output)["backend"]) == (0, "cpu")


def test_histogram(folder, capsys):
    state = {"params": {"w": jnp.array([1e-9, 1.0, 1e6, jnp.nan]), "b": jnp.zeros(2)}, "step": 3}
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.save(7, args=ocp.args.StandardSave(state))
    code, output, _ = run(capsys, "histogram run --plot h.png --loss-scale 1024")
    assert code == 0
    assert "cast to float16 after scaling by 1024" in output
    assert "params/w" in output
    assert matplotlib.image.imread(folder / "h.png").std() > 0.05
    code, output, _ = run(capsys, "histogram run --step 3 --only /w$ --dtype bfloat16 --json")
    [row] = json.loads(output)["rows"]
    assert (row["path"], row["lowest"], row["highest"]) == ("params/w", -30, 19)
    code, _, error = run(capsys, "histogram run --only ^params")
    assert "'^params' matches 2 of 3 arrays, in params" in error
    code, output, error = run(capsys, "histogram run --only kernel")
    assert (code, output) == (2, "")
    assert "--only matches none of the paths params/b, params/w, step" in error
    assert "no checkpoint of step 5" in run(capsys, "histogram run --step 5")[2]
    assert "dtype is int7" in run(capsys, "histogram run --dtype int7")[2]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("programs_of_cli", "the program is 'programs_of_cli': write module:function"),
        ("nothing_here:loss", "there is no module 'nothing_here' here or installed"),
        ("nothing_here.py:loss", "there is no file nothing_here.py"),
        ("programs_of_cli:lost", "has no function 'lost'; it has loss_fn, loss, half"),
        ("programs_of_cli:constant", "has no function 'constant'"),
        ("programs_of_cli:no_tuple", "returned function, but is to return a tuple"),
        (
            "programs_of_cli:of_options",
            "called with nothing: missing a required argument: 'options'",
        ),
        ("programs_of_cli:raises", "KeyError: 'mine'"),
    ],
)
def test_a_program_that_cannot_be_had(folder, capsys, program, words):
    code, output, error = run(capsys, f"audit {program}")
    assert (code, output) == (2, "")
    assert words in error
    assert ("Traceback" in error) == (program == "programs_of_cli:raises")


def test_nothing_to_compare(folder, capsys):
    code, output, error = run(capsys, "compare programs_of_cli:alone")
    assert (code, output) == (2, "")
    assert "programs_of_cli:alone returned a function alone" in error


def test_a_module_that_lacks_another_one_says_so(folder, capsys):
    (folder / "lacking.py").write_text("import nothing_at_all")
    code, _, error = run(capsys, "audit lacking:loss")
    assert code == 2
    assert "ModuleNotFoundError: No module named 'nothing_at_all'" in error


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "required: COMMAND"),
        ("doctor --seconds -1", "-1 is not positive and finite"),
        ("doctor --seconds inf", "inf is not positive and finite"),
        ("doctor --seconds nan", "nan is not positive and finite"),
        ("doctor --seconds long", "'long' is no number"),
        ("audit p:f --plot nowhere/a.png", "there is no directory 'nowhere'"),
        ("compare p:f --plot a.txt", "'a.txt' ends in none of .png, .svg, .pdf"),
        ("histogram run --only *", "'*' is no regular expression"),
        ("audit p:f --level optimised", "invalid choice: 'optimised'"),
        ("compare p:f --steps many", "invalid int value"),
    ],
)
def test_bad_arguments_end_with_2(capsys, command, words):
    with pytest.raises(SystemExit) as end:
        cli.main(command.split())
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "audit", "compare", "locate", "histogram"])
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert "exit codes:" in output
    assert "--json" in output
    assert ("module:function" in output) == (command in ("audit", "compare", "locate"))


def test_it_is_installed():
    done = subprocess.run(
        [sys.executable, "-m", "jmp_kit.cli", "--help"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0
    assert "COMMAND" in done.stdout


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jmp-kit {jmp_kit.__version__}\n"


@pytest.mark.parametrize("code", ["0", "1", "", "'done'"])
def test_a_program_that_exits_was_not_audited(folder, capsys, code):
    (folder / "exits.py").write_text(f"import sys\ndef step(): pass\nsys.exit({code})\n")
    for name in ("exits:step", "exits.py:step"):
        found, output, error = run(capsys, f"audit {name} --assert-half")
        assert (found, output) == (2, "")
        assert "called sys.exit(" in error


@pytest.mark.parametrize("name", ["statistics", "train.v2", "has space"])
def test_a_file_is_itself_whatever_its_name(folder, name):
    (folder / f"{name}.py").write_text(PROGRAMS)
    done = subprocess.run(
        [sys.executable, "-m", "jmp_kit.cli", "audit", f"./{name}.py:half"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "2 products" in done.stdout, done.stderr
    assert f"{name}.py:5" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_that_is_lost_is_no_answer(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jmp_kit.cli", "audit", "programs_of_cli.py:half"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert done.returncode == 2
    assert "jmp-kit audit: the output could not be written: [Errno 28]" in done.stderr


def test_output_that_is_lost_is_told(folder, capsys, monkeypatch):
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError("nobody reads")

    with open(folder / "nobody", "w") as file:
        broken = Broken()
        broken.fileno = file.fileno
        monkeypatch.setattr(sys, "stdout", broken)
        assert cli.main(["audit", "programs_of_cli:half"]) == 2
    assert "the output could not be written: nobody reads" in capsys.readouterr().err


def test_a_gradient_that_overflows_is_told(folder, capsys):
    (folder / "large.py").write_text(
        "import jax.numpy as jnp\n"
        "def loss():\n"
        "    return lambda w, x: jnp.sum((x @ w) ** 2), 300 * jnp.eye(4), 300 * jnp.ones((2, 4))\n"
    )
    command = "compare large.py:loss --steps 1 --policies float16"
    code, output, _ = run(capsys, command)
    assert code == 0
    assert "the gradient in float16 is not finite: locate_nonfinite says where" in output
    assert run(capsys, f"{command} --max-error 1000")[0] == 1
