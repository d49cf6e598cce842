"""Every benchmark runs, as toys; what the tables say is read off what was measured."""

import dataclasses
import importlib.util
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import corpus, gpt, gpt_size, gpus, held_out, report, results, torch_gpt
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.compiled import product_dtypes, program_bytes
from benchmarks.deviceless import H200
from benchmarks.measuring import Contender, measure
from benchmarks.programs import KERNELS
from benchmarks.zoo import WIDE, ZOO
from benchmarks.zoo.held_out import HELD_OUT
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Few of some: compiling is slow, and all train steps of a kind are of one making.
ONLY = {
    "gpt": "",
    "resnet": "scaled|DynamicScale|jmp, bfloat16|mpx",
    "mlp": "jmp_kit, bfloat16$",
    "pieces": "^autocast$|dynamic|^half parameters",
    "optimizer": "",
    "ceiling": "",
    "programs": "libraries.*: mixer: |other ways: resnet: (jmp|mpx)|cast once|remainders$",
    "gpus": "^a100",
    "held_out": "^the libraries",
    "gradients": "mixer|llama$",
    "accuracy": "float32, highest|float16, mixed|bfloat16 only",
    "language": "mixed_float16",
    "wire": "",
    "cost": "",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs a benchmark once; its rows."""
    folder = tmp_path_factory.mktemp("results")
    found = {}

    def rows(name):
        if name not in found:
            out = folder / "cpu-2026-01-01.json"
            main([name, "--tiny", "--steps", "2", "--only", ONLY[name], "--out", str(out)])
            found[name] = json.loads(out.read_text())["results"][name]["rows"]
        return found[name]

    return rows


# What compiles a dozen train steps.
SLOW = {"gpt", "resnet", "pieces", "cost", "optimizer", "gradients", "accuracy", "language"}


@pytest.mark.parametrize(
    "name",
    quick_or_slow(BENCHMARKS, BENCHMARKS.keys() - SLOW),
)
def test_it_runs_and_its_table_has_a_row_for_each_contender(name, measured):
    rows = measured(name)
    assert rows
    for row in rows:
        assert results.cells(row, BENCHMARKS[name].COLUMNS)[0]
        refused = name in ("programs", "gpus", "held_out", "wire") and H200.missing is not None
        assert ("failed" in row) == (refused or (name, row["contender"]) in REFUSED)
        if "step_ms" in row:
            assert row["step_ms"] > 0
            assert row["step_ms_quartiles"][0] <= row["step_ms"] <= row["step_ms_quartiles"][1]


TORCH = importlib.util.find_spec("torch") is not None
TORCHAO = TORCH and importlib.util.find_spec("torchao") is not None
NOT_INSTALLED = ([] if TORCHAO else [torch_gpt.FLOAT8]) + ([] if TORCH else [*torch_gpt.AMP])
REFUSED = {("gpt", name) for name in NOT_INSTALLED}


@pytest.mark.slow
@pytest.mark.torch
def test_all_contenders_train_the_same_model(measured):
    rows = [row for row in measured("gpt") if "failed" not in row]
    assert len(rows) == 18 + 3 * TORCH + TORCHAO
    for row in rows:
        if not row["contender"].startswith("PyTorch"):  # which draws other weights
            assert abs(row["losses"][0] - rows[-1]["losses"][0]) < 0.02
        assert row["losses"][-1] < row["losses"][0]
    by_name = {row["contender"]: row for row in rows}
    assert by_name["jmp_kit, bfloat16"]["words_per_s"] > 0
    if TORCHAO:
        assert by_name[torch_gpt.FLOAT8]["float8_layers"] == 4


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({}, 'PyTorch is not installed: pip install ".[torch]"'),
        ({"torch": True}, "torchao is not installed: pip install torchao"),
    ],
)
def test_a_row_says_what_to_install(installed, told, monkeypatch):
    monkeypatch.setattr(torch_gpt.importlib.util, "find_spec", installed.get)
    options = results.Options(tiny=True, steps=1, only=re.compile("torchao"))
    rows = torch_gpt.measure(torch_gpt.BESIDE_FLOAT8, gpt.TINY[gpt.WIDE], [], options)
    assert rows == [{"contender": torch_gpt.FLOAT8, "failed": told}]


@dataclasses.dataclass
class Layer:
    in_features: int
    out_features: int


@dataclasses.dataclass
class Float8Layer(Layer):
    config: "Float8Config"


@dataclasses.dataclass
class Float8Config:
    recipe: str
    emulate: bool = False


@pytest.fixture
def torchao(monkeypatch):
    """What `torch_gpt` takes of torchao, for lists of layers."""

    def convert(layers, *, config, module_filter_fn):
        for i, layer in enumerate(layers):
            if module_filter_fn(layer, str(i)):
                layers[i] = Float8Layer(layer.in_features, layer.out_features, config)

    package, module = types.ModuleType("torchao.float8"), types.ModuleType("linear")
    package.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=Float8Config)
    package.convert_to_float8_training = convert
    module.Float8Linear = Float8Layer
    for name, found in {
        "torchao": types.ModuleType("torchao"),
        "torchao.float8": package,
        "torchao.float8.float8_linear": module,
    }.items():
        monkeypatch.setitem(sys.modules, name, found)


class Layers(list):
    def modules(self):
        return self


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("device", "emulate"), [("cuda", False), ("cpu", True)])
def test_torchao_takes_what_16_divides(device, emulate):
    layers = Layers([Layer(32, 48), Layer(32, 40), Layer(24, 32)])
    assert torch_gpt._to_float8(layers, device) == 1
    assert layers[0].config == Float8Config("rowwise", emulate)
    assert layers[1:] == [Layer(32, 40), Layer(24, 32)]


@pytest.mark.usefixtures("torchao")
def test_a_model_without_float8_is_not_called_float8():
    with pytest.raises(ValueError, match="torchao makes no layer of this model float8"):
        torch_gpt._to_float8(Layers([Layer(32, 40)]), "cuda")


def test_the_operations_of_a_gpt():
    """Counted by XLA for the forward pass: a third of a step's, attention whole."""
    size = gpt_size.Size(layers=2, heads=2, width=128, batch=2, time=64, vocabulary=512)
    task = gpt.task(size)
    params, rest = jax.eval_shape(lambda: task.variables)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    program = jax.jit(task.loss()).lower(params, rest, tokens, tokens).compile()
    whole = size.operations / 3 + 2 * 2 * 64 * 2 * 64 * 128
    assert program.cost_analysis()["flops"] == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("error", [NotImplementedError, ArithmeticError])
def test_what_a_contender_refuses_is_told_and_the_others_go_on(error):
    def refused(state, x):
        raise error("no such kernel here\nwith details")

    contenders = [
        Contender("refuses", refused, lambda: jnp.zeros(())),
        Contender("runs", lambda state, x: (state + x.sum(), state), lambda: jnp.zeros(())),
    ]
    rows = measure(contenders, [(jnp.ones(3),), (jnp.zeros(3),)], steps=3, title="two")
    told = f"{error.__name__}: no such kernel here"
    assert rows[0] == {"contender": "refuses", "failed": told}
    assert rows[1]["losses"][:4] == [0, 3, 3, 6]
    table = results.cells(rows[0], gpt.COLUMNS)
    assert table == ["refuses", f"not measured: {told}"]


def test_contenders_take_turns():
    order = []

    def step_of(name):
        def step(state, x):
            jax.debug.callback(lambda: order.append(name), ordered=True)
            return state + x, state

        return step

    contenders = [Contender(name, step_of(name), lambda: jnp.zeros(())) for name in "ab"]
    measure(contenders, [(jnp.ones(()),)], steps=2, title="turns")
    jax.effects_barrier()
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert "".join(turns) == "ababab"  # once to warm up


def test_the_text_is_real_and_the_same_each_time():
    first, again = (corpus.batches(2, 3, 8, 100, limit=20) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    inputs, labels = first[0]
    assert inputs.shape == labels.shape == (3, 8)
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    assert 0 <= inputs.min() < inputs.max() < 100


def test_products_and_memory_of_a_compiled_program():
    x = jnp.ones((8, 8))
    program = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile()
    assert product_dtypes(program) == {"f32": 2}
    assert program_bytes(program) >= x.nbytes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gtp"], "there is no benchmark 'gtp'; there are programs, held_out, gpus, ceiling"),
        (["gpt", "--steps", "0"], "--steps is 0, but a median needs at least 1"),
        (["gpt", "--only", "("], "--only '(' is no regular expression"),
    ],
)
def test_bad_arguments_are_told(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err


def test_results_of_two_machines_do_not_mix(tmp_path):
    file = tmp_path / "x.json"
    results.save(file, "a", {"rows": [{"contender": "x"}]})
    results.save(file, "b", {"rows": []})
    assert set(json.loads(file.read_text())["results"]) == {"a", "b"}
    file.write_text(file.read_text().replace('"machine": "', '"machine": "other '))
    with pytest.raises(ValueError, match="measured with machine 'other"):
        results.save(file, "c", {"rows": []})


# The site's figures.


def test_the_gpt_learns_the_same_in_half_precision_as_the_site_shows():
    rows = report.newest(report.ROOT / "benchmarks" / "results")["language"]["rows"]
    bits = [row["bits_per_byte"] for row in rows]
    assert [len(row["of_seeds"]) for row in rows] == [3, 3, 3]
    assert max(bits) < 2.5
    assert max(bits) - min(bits) < 0.03
    assert max(row["minutes"] for row in rows) < 10


@pytest.fixture(scope="module")
def programs():
    """The newest rows by what they are of."""
    rows = report.newest(report.ROOT / "benchmarks" / "results")["programs"]["rows"]
    return {(row["group"], row["model"], row["contender"]): row for row in rows}


def test_serving_takes_half_the_memory_as_the_site_says(programs):
    serving = {
        c: row["program_mib"] for (group, _, c), row in programs.items() if group == "serving"
    }
    assert serving["jmp_kit, bfloat16, cast once"] <= 0.51 * serving["float32"]


def test_half_precision_moves_and_needs_no_more_than_by_hand_as_the_site_says(programs):
    own = "XLA's own kernels"
    for ours in ("jmp_kit, bfloat16", "jmp_kit, bfloat16, one line"):
        row = programs[own, "gpt", ours]
        assert row["temporary_mib_ratio"] <= 0.75
        assert row["bytes_moved_ratio"] <= 1.05


def test_a_loss_of_integer_labels_moves_and_needs_what_its_page_says(programs):
    ways = "jmp_kit, bfloat16", "by hand, bfloat16"
    ours, hand = (programs["other ways", "gpt", f"{way}, loss of integer labels"] for way in ways)
    said = " ".join((report.ROOT / "docs/recipes/precision.md").read_text().split())
    moved, needed = (
        [f"{row[key] / unit:.1f}" for row in (ours, hand)]
        for key, unit in (("bytes_moved", 1e9), ("temporary_mib", 2**10))
    )
    assert "{} GB where by hand it moves {}".format(*moved) in said
    assert "temporary buffers of {} GiB for {}".format(*needed) in said


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_tell_the_best_and_the_worst_model(page, programs):
    own, ours = "XLA's own kernels", "jmp_kit, bfloat16, one line"
    rows = [programs[own, model, ours] for model in ZOO]
    said = " ".join((report.ROOT / page).read_text().split())
    for key, sentence in (
        ("temporary_mib_ratio", "need {} to {} times as much temporary memory"),
        ("bytes_moved_ratio", "read and write {} to {} times as many bytes"),
    ):
        ratios = [row[key] for row in rows]
        assert sentence.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}") in said
    assert sum(row["bytes_moved_ratio"] > 1 for row in rows) == 4
    newest = report.newest(report.ROOT / "benchmarks" / "results")
    assert {row["contender"] for row in newest["gpus"]["rows"]} == ZOO.keys()
    for target, gpu in gpus.GPUS.items():
        ratios = [row[f"{target}_bytes_moved_ratio"] for row in newest["gpus"]["rows"]]
        assert f"{min(ratios):.2f} to {max(ratios):.2f} ({gpu})" in said
    rows = newest["gradients"]["rows"]
    assert {row["contender"] for row in rows} == ZOO.keys()
    errors = [row["one_line"] / row["by_hand"] for row in rows]
    assert f"{min(errors):.2f} to {max(errors):.2f} of the error by hand" in said


def test_every_model_that_was_held_out_was_compiled_at_first_and_since():
    file = json.loads(held_out.FIRST.read_text())["results"]["held_out"]
    newest = report.newest(report.ROOT / "benchmarks" / "results")["held_out"]
    names = [(kernels, name) for kernels in KERNELS for name in HELD_OUT]
    for rows in (file["rows"], newest["rows"]):
        assert [(row["group"], row["contender"]) for row in rows] == names
    first = [row["one line_bytes_moved_ratio"] for row in file["rows"]]
    assert [row["first"] for row in newest["rows"]] == first


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_tell_what_came_at_first_of_the_models_that_were_held_out(page):
    file = json.loads(held_out.FIRST.read_text())["results"]["held_out"]
    first = [row["one line_bytes_moved_ratio"] for row in file["rows"][: len(HELD_OUT)]]
    assert (len(first), sum(ratio <= 1 for ratio in first)) == (18, 12)
    said = " ".join((report.ROOT / page).read_text().split())
    told = f"twelve moved no more when first compiled, and all {min(first):.2f} to {max(first):.2f}"
    assert f"Of eighteen more, held out until all were written, {told} times as many" in said


def test_a_recurrent_network_moves_what_its_page_says(programs):
    row = programs["XLA's own kernels", "lstm", "jmp_kit, bfloat16, one line"]
    said = " ".join((report.ROOT / "docs/concepts/index.md").read_text().split())
    assert f"1,024 channels moves {row['bytes_moved_ratio']:.2f} of the bytes" in said


def test_float8_takes_as_long_as_its_page_says(programs):
    ours = "jmp_kit, float8, one line"
    for kernels, most in (("XLA's own kernels", 0.7), ("the libraries' kernels", 0.75)):
        for model in WIDE:
            row = programs[f"float8, {kernels}", model, ours]
            assert round(row["estimated_ms_ratio"], 2) <= most  # as the page says it


def test_the_zoo_is_compiled_in_three_ways_with_both_kinds_of_kernels(programs):
    for group in KERNELS:
        for model in ZOO:
            assert len([key for key in programs if key[:2] == (group, model)]) == 3


def rows_of(speed):
    return [
        {"contender": "by hand", "step_ms": 2.0, "images_per_s": speed, "program_mib": 2048.0},
        {"contender": "jmp_kit", "step_ms": 1.0, "images_per_s": 2 * speed, "program_mib": 1024.0},
        {"contender": "torch", "failed": "not here"},
    ]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "concepts").mkdir(parents=True)
    for page in report.PAGES:
        (tmp_path / page).write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")

    def put(name, device, speed, tiny=False):
        file = {"machine": device, "versions": {"jax": "0.11.0", "torch": "not installed"}}
        file["results"] = {"resnet": {"device": device, "tiny": tiny, "rows": rows_of(speed)}}
        (tmp_path / "benchmarks" / "results" / name).write_text(json.dumps(file))

    return types.SimpleNamespace(path=tmp_path, put=put)


def test_the_report_takes_the_newest_of_a_gpu(root):
    root.put("h200-2026-01-01.json", "NVIDIA H200", 100)
    root.put("h200-2026-02-01.json", "NVIDIA H200", 1000)
    root.put("h200-2026-03-01.json", "NVIDIA H200", 7, tiny=True)
    root.put("cpu-2026-04-01.json", "cpu", 1)
    report.main([], root.path)
    page = (root.path / "docs" / "benchmarks.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "NVIDIA H200, 2026-02-01; jax 0.11.0." in page
    assert "| jmp_kit | 2,000 | 1.00 |" in page
    assert "| torch | not measured: not here |" in page
    assert "old" not in page
    assert page.count("Not yet measured") == 1
    assert "`python -m benchmarks gpt`" in page
    assert (root.path / "docs" / "resnet.png").read_bytes().startswith(b"\x89PNG")
    report.main(["--check"], root.path)


def test_the_report_tells_of_other_figures(root):
    with pytest.raises(SystemExit, match="python -m benchmarks.report"):
        report.main(["--check"], root.path)
    (root.path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        report.main([], root.path)


def test_the_pages_have_the_figures_of_the_results():
    report.main(["--check"])


def test_recomputation_saves_memory_as_the_site_says(programs):
    own, ours = "XLA's own kernels", "jmp_kit, bfloat16"
    for model, most in (("gpt plain", 0.6), ("resnet", 0.7)):
        kept = programs["other ways", model, f"{ours}, kept"]
        again = programs[own, model, ours]
        assert again["temporary_mib"] <= most * kept["temporary_mib"]
        assert again["bytes_moved"] <= kept["bytes_moved"]
