"""What `import shoal` gives does from Python what the verbs do in a shell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.weights import save_weights
from tests import programs

ROOT = Path(__file__).parents[1]
RUN = {
    "run": {"name": "api", "steps": 1, "processes": 2},
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 4, "vocabulary": 256},
    "data": {"kind": "stdlib"},
    "batch": {"global_samples": 8, "sequence": 16},
}
VERIFIED = """
import sys
import shoal, torch
from torch import nn

class Shifted(nn.Linear):
    def forward(self, x):
        import os
        return super().forward(x) + float(os.environ.get("RANK", "0")) * float(sys.argv[1])

x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(1)
model = nn.Sequential(Shifted(4, 8), nn.ReLU(), nn.Linear(8, 2))
config = {"run": {"name": "own", "steps": 2}, "batch": {"global_samples": 8}, "optimizer": {"kind": "sgd"}}
try:
    for layout in ("replicate", "shard"):
        verdict = shoal.verify(config, [f"layout.{layout}=2"], model=model, data=(data, data), steps=1)
        print("holds", verdict["holds"], verdict["layout"])
except shoal.RunFailed as failure:
    print("failed", failure.exit_code, failure.sentence)
"""


def tied() -> nn.Module:
    """A module with a buffer and a parameter that has two names."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    return model


def saved(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of `model`, each under its first name, as the checkpoint of a run directory."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "2.weight"}
    save_weights(weights, folder, folder)
    return weights


def test_the_page_of_the_api_lists_what_can_be_imported() -> None:
    """`shoal.__all__` and the table of docs/python-api.md are the same names."""
    page = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `shoal\.(\w+)", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(shoal.__all__)
    assert all(hasattr(shoal, name) for name in shoal.__all__)


def test_completion_and_help_know_every_name() -> None:
    """Before anything was used: `dir` lists what an attribute's first use imports."""
    code = "import shoal, sys; print(set(shoal.__all__) <= set(dir(shoal)), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True False\n"


def test_a_checkpoint_is_loaded_by_the_names_of_the_model(tmp_path: Path) -> None:
    """Bit by bit, and into a module that ties parameters."""
    weights = saved(tied(), tmp_path)
    model = tied()
    loaded = shoal.load_checkpoint(tmp_path, model)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items() if name in weights)
    assert model[2].weight is model[0].weight


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (nn.Sequential(nn.Linear(3, 3)), "has no '0.bias'"),
        (nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(3)), "has another shape of '0.weight'"),
        (nn.Sequential(nn.Linear(3, 3, bias=False)), "has, and the model lacks, '1.bias'"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, other: nn.Module, sentence: str) -> None:
    """By the first name that differs; the module stays as it was."""
    saved(tied(), tmp_path)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(shoal.ShoalError, match=re.escape(sentence)):
        shoal.load_checkpoint(tmp_path, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.slow
def test_plans_are_those_of_the_shell(tmp_path: Path) -> None:
    """The entries of `plans` in `shoal plan --json`."""
    plans = shoal.plan(RUN, keep=3)
    assert [one["step_s"] for one in plans] == sorted(one["step_s"] for one in plans)
    assert all(one["fits"] for one in plans)
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for table, keys in RUN.items()
    )
    (tmp_path / "run.toml").write_text(text)
    done = programs.run(["-m", "shoal", "plan", "run.toml", "--top", "3", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"] == json.loads(json.dumps(plans))


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "said"), [("0.0", "holds True 2 replicas\nholds True"), ("0.1", "failed 6 ")])
def test_a_script_proves_its_own_objects(tmp_path: Path, shift: str, said: str) -> None:
    """Layouts that compute what one process computes hold, one call after the other; a model that computes otherwise on
    rank 1 does not.
    """
    (tmp_path / "script.py").write_text(VERIFIED)
    done = programs.run(["script.py", shift], cwd=tmp_path)
    assert said in done.stdout.replace(" = 2 ranks", ""), done.stdout + done.stderr
    assert not (tmp_path / "runs/own/checkpoints").exists()


DOUBLE = """
import shoal, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(2, 1).double()
before = model.weight.detach().clone()
data = torch.utils.data.TensorDataset(torch.ones(4, 2).double(), torch.ones(4, 1).double())
config = {"run": {"name": "own", "steps": 1, "processes": 1}, "batch": {"global_samples": 4},
          "loss": {"kind": "squared_error"}, "optimizer": {"kind": "sgd", "lr": 1e-12}}
shoal.train(config, model=model, data=data)
print(model.weight.dtype, 0 < float((model.weight - before).abs().max()) < 1e-10)
"""


@pytest.mark.slow
def test_a_module_in_float64_trains_in_it(tmp_path: Path) -> None:
    """Its weights move by less than float32 could show."""
    (tmp_path / "script.py").write_text(DOUBLE)
    done = programs.run(["script.py"], cwd=tmp_path)
    assert "torch.float64 True" in done.stdout, done.stdout + done.stderr


LAUNCHED = """
import os, sys
from pathlib import Path
import shoal

class Work:
    def own(self):
        pass

    @staticmethod
    def done(word, number):
        Path(f"{word}-{number}-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").touch()

def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("no such thing")

if __name__ == "__main__":
    shoal.launch(Work.done, "a", 3, processes=2)
    shoal.launch(Path(__file__).parent / "other.py", "b", processes=2)
    try:
        shoal.launch(fails, processes=2)
    except shoal.RunFailed as failure:
        Path(f"failed-{failure.rank}").write_text(failure.sentence)
    refused = [(lambda: None, None), (Work().own, None), (fails, object()), (fails, {0: 1}), (fails, (1, 2))]
    for target, argument in [*refused, (Path("absent.py"), None), (fails, None)]:
        if argument is None and target is fails:
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        try:
            shoal.launch(target, *([] if argument is None else [argument]))
        except shoal.ShoalError as refusal:
            print(refusal)
"""


def test_functions_and_scripts_are_launched(tmp_path: Path) -> None:
    """With their arguments, once a rank; a rank that fails is named, and what cannot be run is refused."""
    (tmp_path / "other.py").write_text("import os, sys; open(sys.argv[1] + os.environ['RANK'], 'w')")
    (tmp_path / "mine.py").write_text(LAUNCHED)
    done = programs.run(["mine.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = {path.name for path in tmp_path.iterdir()}
    assert made >= {"a-3-0-of-2", "a-3-1-of-2", "b0", "b1", "failed-1"}
    assert "no such thing" in (tmp_path / "failed-1").read_text()
    assert done.stdout.count("cannot find") == 2
    assert done.stdout.count("which changes these") == 2
    for words in ("cannot hold", "absent.py is no Python script", 'under if __name__ == "__main__"'):
        assert words in done.stdout


def test_a_function_of_a_module_is_launched(tmp_path: Path) -> None:
    """Of `python -m package.module`, whose imports are relative."""
    package = tmp_path / "work"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "name.py").write_text("NAME = 'made'\n")
    text = "from .name import NAME\nimport os, shoal\ndef main(): open(NAME + os.environ['RANK'], 'w')\n"
    (package / "start.py").write_text(text + "if __name__ == '__main__': shoal.launch(main, processes=2)\n")
    done = programs.run(["-m", "work.start"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("made*")} == {"made0", "made1"}


def test_a_loop_whose_configuration_cannot_be_read_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is missing, and an object that holds no tables: exit 2, no traceback."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for config, said in (
        ("nowhere.toml", "nowhere.toml is missing"),
        (object(), "is of the type object: give a run file"),
    ):
        with pytest.raises(SystemExit) as ended:
            shoal.start(config, model=model, optimizer=optimizer)  # type: ignore[arg-type]
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
