"""The commands of the page on many nodes are taken by torchrun and by `shardwise train`."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from shardwise.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "many-nodes.md"
MANIFEST = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
COMMAND = re.compile(r"torchrun (.*?)(?='?\n```|'?\n$|\Z)", re.DOTALL)


def commands() -> dict[str, str]:
    """Return the commands of the page by what starts them."""
    shells = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert MANIFEST is not None
    *_, job = yaml.safe_load_all(MANIFEST[1])
    texts = {"by hand": shells[0], "slurm": shells[1]}
    texts["kubernetes"] = job["spec"]["trainer"]["args"][0]
    return {name: text[text.index("torchrun") :].rstrip("'\n") for name, text in texts.items()}


@pytest.mark.parametrize("launcher", ["by hand", "slurm", "kubernetes"])
def test_torchrun_and_the_run_take_the_flags_of_a_recipe(launcher: str, tmp_path: Path) -> None:
    text = commands()[launcher].replace("\\\n", " ")
    text = re.sub(r"\$\(\[.*?\)", "1", text).replace("$IS_NODE0", "1")
    _, *words = shlex.split(re.sub(r"'?\"?\$\w+\"?'?", "node0", text))
    asked = get_args_parser().parse_args(words)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend) == ("2:4", "8", "c10d")
    assert (asked.module, asked.training_script) == (True, "shardwise")
    command, file, *flags = asked.training_script_args
    assert command == "train" and file.endswith("run.yaml")
    # What the command makes of them, but for the file, which nobody has.
    (tmp_path / "run.yaml").write_text("data: nowhere.txt\n")
    told = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), *flags])
    assert told.exit_code == 2 and "data: " in told.stderr, told.stderr


def test_the_manifest_names_the_container_and_the_label_that_the_trainer_looks_for() -> None:
    assert MANIFEST is not None
    runtime, job = yaml.safe_load_all(MANIFEST[1])
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == node["name"] == "node"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
