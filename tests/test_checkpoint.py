"""Nothing is lost: not by a crash, not by damage, not by a restart at another precision."""

import gc
import json
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jmp_kit
from jmp_kit import DynamicLossScale, mixed_precision
from jmp_kit.checkpoint import read, restore

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent


def trained(dtype, master, steps=4, **kwargs):
    optimizer = mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        DynamicLossScale(2.0**10, period=3, hysteresis=2),
        master=master,
        **kwargs,
    )
    params = {
        "w": jax.random.normal(jax.random.key(0), (33, 7)).astype(dtype),
        "a/b.c d": jnp.zeros((), dtype),
        "list": [jnp.ones(2, jnp.float32), None],
    }
    opt_state = optimizer.init(params)
    for i in range(steps):
        value = jnp.nan if i == 2 else 0.3 * i
        grads = jax.tree.map(lambda p, v=value: jnp.full(p.shape, v), params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    ema = optax.ema(0.9).init(jmp_kit.master_params(opt_state, params))
    return {
        "params": params,
        "opt_state": opt_state,
        "ema": ema,
        "key": jax.random.key(steps),
        "raw_key": jax.random.PRNGKey(steps),
        "step": steps,
        "history": np.arange(5.0, dtype=np.float32),
    }


def save(directory, *states):
    with ocp.CheckpointManager(directory) as manager:
        for state in states:
            manager.save(state["step"], args=ocp.args.StandardSave(state))


def save_alone(directory, state):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))


def bits(tree):
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in leaves]
    arrays = [
        np.asarray(jax.random.key_data(x) if key else x)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return [(x.dtype, x.shape, x.tobytes()) for x in arrays]


FORMS = [
    (jnp.float32, "float32"),
    (jnp.bfloat16, "remainder"),
    (jnp.float16, "kahan"),
    (jnp.bfloat16, "stochastic"),
]
forms = pytest.mark.parametrize(
    ("dtype", "master"), FORMS, ids=lambda x: x if isinstance(x, str) else jnp.dtype(x).name
)


@forms
def test_every_bit_comes_back(dtype, master, tmp_path):
    state = trained(dtype, master, moment_dtype="bfloat16", seed=3)
    save(tmp_path, state)
    back = restore(tmp_path, trained(dtype, master, 0, moment_dtype="bfloat16"))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert bits(back) == bits(state)
    assert type(back["step"]) is int
    assert isinstance(back["history"], np.ndarray)
    assert back["key"].dtype == state["key"].dtype


@pytest.mark.parametrize("there", [FORMS[0], FORMS[1]], ids=["full", "remainder"])
@pytest.mark.parametrize("here", [FORMS[0], FORMS[1]], ids=["full", "remainder"])
def test_a_restart_at_another_precision_has_the_same_weights(there, here, tmp_path):
    state = trained(*there)
    save(tmp_path, state)
    back = restore(tmp_path, trained(*here, 0))
    assert back["params"]["w"].dtype == here[0]
    weights = [jmp_kit.master_params(s["opt_state"], s["params"]) for s in (state, back)]
    assert bits(weights[0]) == bits(weights[1])
    assert bits(back["opt_state"].inner_state) == bits(state["opt_state"].inner_state)


def test_an_inexact_restart_is_refused_unless_asked_for(tmp_path):
    save(tmp_path, trained(jnp.float32, "float32"))
    like = trained(jnp.float16, "kahan", 0)
    with pytest.raises(ValueError, match=r"cannot be kept exactly: .*params/w .*exact=False"):
        restore(tmp_path, like)
    assert restore(tmp_path, like, exact=False)["params"]["w"].dtype == jnp.float16


def test_steps_and_where_the_checkpoint_lies(tmp_path):
    first, second = trained(jnp.bfloat16, "remainder", 2), trained(jnp.bfloat16, "remainder", 4)
    like = trained(jnp.bfloat16, "remainder", 0)
    save(tmp_path, first, second)
    assert restore(tmp_path, like)["step"] == 4
    assert restore(tmp_path, like, step=2)["step"] == 2
    assert restore(str(tmp_path / "2"), like)["step"] == 2
    assert restore(tmp_path / "2" / "default", like)["step"] == 2
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "alone", first)
    assert restore(tmp_path / "alone", like)["step"] == 2


def test_arrays_return_to_their_devices(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    optimizer = mixed_precision(optax.adam(1e-3), master="remainder")

    def start(dtype, sharded):
        params = {"w": jnp.linspace(0, 1, 16).astype(dtype)}
        state = {"params": params, "opt_state": optimizer.init(params)}
        if sharded:
            state = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.shape else x, state)
        return state

    save_alone(tmp_path, start(jnp.float32, sharded=True))
    for dtype in (jnp.float32, jnp.bfloat16):
        back = restore(tmp_path, start(dtype, sharded=True))
        assert {x.sharding for x in jax.tree.leaves(back) if x.shape} == {sharding}
        alone = restore(tmp_path, start(dtype, sharded=False))
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(alone)} == {1}
        assert bits(alone) == bits(back)
        jax.jit(optimizer.update)(back["params"], back["opt_state"], back["params"])


@pytest.mark.parametrize("around", [lambda o: o, mixed_precision])
@pytest.mark.parametrize("then", [lambda o: o, mixed_precision])
def test_random_keys_and_places_with_and_without_mixed_precision(around, then, tmp_path):
    """`optax.add_noise` has a typed key, which NumPy has not, in its state."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def start(wrap):
        params = {"w": jax.device_put(jnp.ones(16), sharding)}
        inner = optax.chain(optax.add_noise(0.1, 0.5, 3), optax.adam(1e-2))
        return {"params": params, "opt_state": wrap(inner).init(params)}

    save_alone(tmp_path, start(around))
    back = restore(tmp_path, start(then))
    assert bits(back) == bits(start(then))
    assert {x.sharding for x in jax.tree.leaves(back) if x.shape} == {sharding}


def test_numbers_of_numpy_come_back_as_they_were(tmp_path):
    state = {"params": {"w": jnp.ones(2)}, "best": np.float32(3), "seen": np.int64(7)}
    save_alone(tmp_path, state)
    back = restore(tmp_path, state)
    assert [type(back[name]) for name in ("best", "seen")] == [np.float32, np.int64]


def test_functions_in_a_model_are_not_missed(tmp_path):
    save_alone(tmp_path, {"params": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match=r"missing: params/act(.|\n)*Functions are not saved"):
        restore(tmp_path, {"params": {"w": jnp.ones(2), "act": jnp.tanh}})


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with two checkpoints, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("two")
    with jax.numpy_dtype_promotion("standard"):
        save(directory, *(trained(jnp.bfloat16, "remainder", steps) for steps in (2, 4)))
    return directory


def damaged_files(step):
    """The files of a checkpoint that Orbax may read when it restores."""
    structure = [step / "default" / name for name in ("_METADATA", "_sharding", "manifest.ocdbt")]
    data = [path for path in (step / "default").rglob("d/*") if path.stat().st_size]
    largest = max(data, key=lambda path: path.stat().st_size)
    return [*structure, *(step / "default" / "d").iterdir(), largest]


def is_read(directory, file, like, copy):
    """Not every file of an index is: what was written while it grew may be there still."""
    shutil.copytree(directory, copy)
    (copy / file).unlink()
    try:
        restore(copy, like)
    except ValueError:
        return True
    return False


@pytest.fixture
def loose_ends():
    """When one array cannot be read, Orbax closes its event loop on those under way."""
    yield
    time.sleep(0.3)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(
    two_steps, left, tmp_path, loose_ends
):
    like = trained(jnp.bfloat16, "remainder", 0)
    good = restore(two_steps, like, step=2)
    files = [path.relative_to(two_steps) for path in damaged_files(two_steps / "4")]
    files = [
        file
        for i, file in enumerate(files)
        if file.parent.name != "d" or is_read(two_steps, file, like, tmp_path / f"without{i}")
    ]
    assert len(files) >= 4  # Orbax writes data to one file or to several
    for i, file in enumerate(files):
        copy = tmp_path / str(i) / "run"
        shutil.copytree(two_steps, copy)
        content = (copy / file).read_bytes()
        (copy / file).write_bytes(content[: int(left * len(content))])
        with pytest.raises(ValueError, match=r"The checkpoint .*/run/4 cannot be read: ") as error:
            restore(copy, like)
        assert f"{copy}/4/default" in str(error.value)
        assert "fall_back=True" in str(error.value)
        assert "step=2" in str(error.value)
        with pytest.warns(UserWarning, match=r"/run/4 cannot be read.*Falling back to step 2"):
            back = restore(copy, like, fall_back=True)
        assert bits(back) == bits(good)


def test_a_lack_of_memory_is_no_damage(two_steps, monkeypatch):
    def no_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", no_memory)
    with pytest.raises(MemoryError):
        read(two_steps)
    with pytest.raises(MemoryError):
        restore(two_steps, trained(jnp.bfloat16, "remainder", 0), fall_back=True)


def test_with_nothing_to_fall_back_to(tmp_path):
    save(tmp_path, trained(jnp.bfloat16, "remainder", 4))
    (tmp_path / "4" / "default" / "_METADATA").write_text("{")
    like = trained(jnp.bfloat16, "remainder", 0)
    for fall_back in (False, True):
        with pytest.raises(ValueError, match=r"_METADATA is no JSON.*there is none before it"):
            restore(tmp_path, like, fall_back=fall_back)


def test_a_foreign_checkpoint(tmp_path):
    like = trained(jnp.bfloat16, "remainder", 0)
    other = {"params": {"kernel": jnp.ones(3)}, "opt_state": (), "step": 1}
    save(tmp_path / "model", other)
    with pytest.raises(ValueError, match=r"missing: .*unexpected: params/kernel"):
        restore(tmp_path / "model", like)
    (tmp_path / "folder" / "12").mkdir(parents=True)
    (tmp_path / "folder" / "12" / "weights.bin").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"/folder/12 cannot be read: .*no _METADATA in it"):
        restore(tmp_path / "folder", like)


def test_several_items_by_name(tmp_path):
    state = trained(jnp.bfloat16, "remainder", 4)
    like = trained(jnp.bfloat16, "remainder", 0)
    best = {**state, "step": 2}
    with ocp.CheckpointManager(tmp_path) as manager:
        items = {"state": ocp.args.StandardSave(state), "best": ocp.args.StandardSave(best)}
        manager.save(4, args=ocp.args.Composite(**items))
    with pytest.raises(ValueError, match=r"several items, best, state: pass the folder"):
        restore(tmp_path, like)
    assert restore(tmp_path / "4" / "state", like)["step"] == 4
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        manager.save(4, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    assert restore(tmp_path / "one", like)["step"] == 4


def test_a_folder_of_another_kind_is_no_step(two_steps, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(two_steps, copy)
    (copy / "events_2024").mkdir()
    (copy / "2").rename(copy / "checkpoint_0007")
    assert restore(copy, trained(jnp.bfloat16, "remainder", 0))["step"] == 2


def test_a_model_of_other_shapes_on_other_devices(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"params": {"w": jnp.ones((6, 2))}}))
    like = {"params": {"w": jax.device_put(jnp.ones((8, 2)), sharding)}}
    with pytest.raises(ValueError, match=r"different: params/w \(float\[6, 2\], not float\[8, 2\]"):
        restore(tmp_path, like)


def test_an_abstract_like(tmp_path):
    state = trained(jnp.bfloat16, "remainder", 4)
    save(tmp_path, state)
    like = jax.eval_shape(lambda: {**trained(jnp.bfloat16, "remainder", 0)})
    back = restore(tmp_path, like)
    assert bits({**back, "step": 0}) == bits({**state, "step": 0})


@pytest.mark.parametrize("name", ["empty", "absent", "file"])
def test_no_checkpoint_at_all(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint in .*{name}: it has no steps"):
        restore(tmp_path / name, {})


def test_a_directory_elsewhere():
    with pytest.raises(ValueError, match="bucket://run, but restore reads local ones: copy"):
        restore("bucket://run", {})


def test_no_such_step(two_steps):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3 .*its steps are 2, 4"):
        restore(two_steps, {}, step=3)


def test_an_unfinished_save_is_not_a_step(two_steps, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(two_steps, copy)
    (copy / "4").rename(copy / "6.orbax-checkpoint-tmp")
    (copy / "7.orbax-checkpoint-tmp-123").mkdir()
    assert restore(copy, trained(jnp.bfloat16, "remainder", 0))["step"] == 2


@pytest.mark.slow
def test_a_process_killed_twenty_times_ends_with_the_same_bits(tmp_path):
    """SIGKILL while it starts, restores, trains and saves."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.killed", str(tmp_path), "20", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] == 20
    assert result["during_save"] >= 1
    assert len(set(result["steps"])) >= 5
    assert result["ends"][0] == result["ends"][1]


def test_what_was_saved_can_be_read_without_the_program(two_steps, tmp_path):
    state, latest = trained(jnp.bfloat16, "remainder", 0), read(two_steps)
    assert sorted(latest) == sorted(state)
    assert {type(x) for x in jax.tree.leaves(latest["params"])} == {np.ndarray}
    assert read(two_steps, 2)["step"] != latest["step"]
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        read(two_steps, 3)
    with pytest.raises(ValueError, match="not local|reads local ones"):
        read("bucket://run")
    (tmp_path / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read: ValueError: .*_METADATA is no JSON"):
        read(tmp_path)
    copy = tmp_path / "run"
    shutil.copytree(two_steps, copy)
    (copy / "4" / "default" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="pass step=2 for the one before it") as error:
        read(copy)
    assert "fall_back" not in str(error.value)  # which is restore's


@pytest.mark.parametrize("number", [3, 0.5, True])
def test_numbers_of_python_are_no_other_precision(number, tmp_path):
    """Nothing is converted, so parameters may have any name."""
    weights = {"w": jnp.ones(3)}
    state = {"weights": weights, "opt_state": optax.adam(1e-3).init(weights), "number": number}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    back = restore(tmp_path, state)
    assert (back["number"], type(back["number"])) == (number, type(number))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("take", [restore, lambda directory, like: read(directory)])
def test_a_reader_beside_a_writer_that_deletes(two_steps, take, tmp_path, monkeypatch, loose_ends):
    """What was the latest is gone by the time it is read, and there is a later one."""
    folder = tmp_path / "run"
    shutil.copytree(two_steps / "2", folder / "2")
    handler = ocp.PyTreeCheckpointHandler
    restored, turns = handler.restore, []

    def overtaken(self, path, *args, **kwargs):
        turns.append(path.parent.name)
        if len(turns) == 1:
            shutil.copytree(two_steps / "4", folder / "4")
            shutil.rmtree(folder / "2")
        return restored(self, path, *args, **kwargs)

    monkeypatch.setattr(handler, "restore", overtaken)
    back = take(folder, trained(jnp.bfloat16, "remainder", 0))
    assert (turns, int(back["step"])) == (["2", "4"], 4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_was_asked_for_and_is_gone_is_told(two_steps, tmp_path, loose_ends):
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    shutil.rmtree(folder / "2" / "default" / "d")
    with pytest.raises(ValueError, match="cannot be read"):
        restore(folder, trained(jnp.bfloat16, "remainder", 0), step=2)
